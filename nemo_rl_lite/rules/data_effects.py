"""Keys of the data that have an effect only with some sources of rows, or some algorithms."""

from nemo_rl_lite.data.formats import CHATS, PAIRS, PROBLEMS, UNPAIRED, kind_of
from nemo_rl_lite.data.sources import ROWS, TASKS
from nemo_rl_lite.rules.step_effects import Effect

DATA_EFFECTS = (
    Effect(
        ("algorithm.max_num_epochs",),
        lambda config: config.data.name not in TASKS,
        "data=file or data=hub (generated data never ends)",
    ),
    Effect(("data.train_path", "data.validation_path"), lambda config: config.data.name == "file", "data.name=file"),
    Effect(
        ("data.path", "data.subset", "data.train_split", "data.validation_split"),
        lambda config: config.data.name == "hub",
        "data.name=hub",
    ),
    Effect(("data.min_reward",), lambda config: config.data.name in ROWS, "data=samples, data=file or data=hub"),
    Effect(("data.task",), lambda config: config.data.name == "reasoning_gym", "data=reasoning_gym"),
    Effect(
        (
            *("data.shuffle", "data.answer_column", "data.chosen_column", "data.rejected_column"),
            *("data.label_column", "data.train_on"),
        ),
        lambda config: config.data.name in ROWS,
        "data=file or data=hub",
    ),
    Effect(
        ("data.prompt_column",),
        lambda config: config.data.name != "reverse_digits" and config.data.prompt_template is None,
        "data with such columns and data.prompt_template=null",
    ),
    Effect(
        ("data.chosen_column", "data.rejected_column"),
        lambda config: kind_of(config) is PAIRS,
        "algorithm=dpo or algorithm=orpo",
    ),
    Effect(("data.label_column",), lambda config: kind_of(config) is UNPAIRED, "algorithm=kto"),
    Effect(
        ("data.answer_column",),
        lambda config: kind_of(config) is CHATS or kind_of(config) is PROBLEMS,
        "algorithm=grpo or algorithm=sft",
    ),
    Effect(
        ("data.prompt_column", "data.answer_column"),
        lambda config: kind_of(config) is not CHATS or config.data.messages_column is None,
        "data.messages_column=null: the messages are prompt and response",
    ),
    Effect(
        ("data.answer_column",),
        lambda config: kind_of(config) is not CHATS or config.data.response_column is None,
        "data.response_column=null, which names the response in its place",
    ),
    Effect(("data.answer_pattern",), lambda config: kind_of(config) is PROBLEMS, "algorithm=grpo"),
    Effect(("data.train_on",), lambda config: kind_of(config) is CHATS, "algorithm=sft"),
    Effect(
        ("data.train_on",),
        lambda config: config.data.response_column is None and config.data.prompt_template is None,
        "whole chats (data.messages_column): a prompt has one response",
    ),
)
