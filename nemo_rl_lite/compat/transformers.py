"""transformers' chat templates."""

from transformers.utils.chat_template_utils import _get_template_variables

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "transformers", "5.12")


def template_variables(text: str) -> set[str]:
    """Return the names that a chat template reads and does not set."""
    return set(_get_template_variables(text))
