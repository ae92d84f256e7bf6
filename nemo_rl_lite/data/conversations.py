"""Problems as supervised training reads them: the whole response in the answer's place. Imports nothing heavy."""

import dataclasses

from nemo_rl_lite.config.schema import DataConfig


def with_responses(config: DataConfig) -> DataConfig:
    """The same data with the whole text of `data.response_column` for the answer."""
    column = config.response_column or config.answer_column
    return dataclasses.replace(config, answer_column=column, answer_pattern=None)
