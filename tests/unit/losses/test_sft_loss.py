"""The loss against transformers' own cross entropy and TRL's SFTTrainer, on a tiny model and templated chats."""

import pytest
import torch
from datasets import Dataset

from nemo_rl_lite.data.examples import Encoder
from nemo_rl_lite.data.formats import Example, answered
from nemo_rl_lite.data.problems import chat
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.losses.batch import Batch
from nemo_rl_lite.losses.interface import count_masked
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.models.embedded import build_model, build_tokenizer

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    encoder = Encoder(ChatTokenizer(folder), max_length=64, too_long="error")
    texts = [("2+2", "4"), ("reverse 12345", "54321"), ("a", "a longer response than the others"), ("1", "")]
    return encoder.rows([Example((answered(chat(prompt), response),), prompt) for prompt, response in texts])


@pytest.fixture(scope="module")
def batch(rows):
    return Batch.padded(rows)


def token_logprobs(model, tokens):
    """Entry t is the logprob of token t; entry 0 is 0."""
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def of_transformers(model, batch, folder):
    attention = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    labels = torch.where(batch.mask > 0, batch.tokens, -100)
    return model(batch.tokens, attention_mask=attention, labels=labels).loss


def of_trl(model, batch, folder):
    """By its trainer, from the tokens on: its collator makes the labels."""
    # Its import takes seconds, in every process that collects tests.
    from trl import SFTConfig, SFTTrainer

    rows = zip(batch.tokens, batch.mask, batch.lengths, strict=True)
    examples = [
        {"input_ids": tokens[:length].tolist(), "completion_mask": mask[:length].int().tolist()}
        for tokens, mask, length in rows
    ]
    settings = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=len(examples),
        max_length=None,
        completion_only_loss=True,
    )
    trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(examples), processing_class=build_tokenizer())
    return trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))


@pytest.mark.parametrize("theirs_of", [of_transformers, of_trl])
def test_value_and_gradient_are_those_of_others(rows, batch, tmp_path, theirs_of):
    model = build_model(seed=0)
    theirs = theirs_of(model, batch, tmp_path)
    theirs.backward()
    expected = gradients(model)
    model.zero_grad()
    counts = count_masked(rows)
    # One row a micro-batch: the sum of the shares is the whole batch's mean over tokens.
    shares = [Batch.padded([row]) for row in rows]
    losses = [SFTLoss()(token_logprobs(model, share.tokens), share, counts) for share in shares]
    sum(loss for loss, _ in losses).backward()
    torch.testing.assert_close(sum(loss for loss, _ in losses), theirs, atol=TOLERANCE, rtol=0)
    assert sum(metrics["loss"] for _, metrics in losses).item() == pytest.approx(theirs.item(), abs=TOLERANCE)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=TOLERANCE, rtol=0)


def test_only_masked_tokens_count(rows, batch):
    counts = count_masked(rows)
    logprobs = torch.where(batch.mask > 0, -2.0, float("nan")).requires_grad_()
    loss, _ = SFTLoss()(logprobs, batch, counts)
    loss.backward()
    assert loss.item() == pytest.approx(2)
    assert torch.equal(logprobs.grad != 0, batch.mask > 0)
