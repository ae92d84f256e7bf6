"""Write a shell script that completes commands, groups, files, keys and choices with Tab."""

import re
from collections.abc import Iterable, Iterator

from nemo_rl_lite.config.keys import groups
from nemo_rl_lite.config.reference import entries

SHELLS = ("bash", "zsh")
# Commands that take overrides.
_COMPOSE = ("train", "plan", "rehearse", "doctor", "slurm", "evaluate", "chat", "serve")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """_nrl_lite() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" words=""
    local current="${{line##* }}"
    case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
        1:*) words="{verbs}" ;;
        *:{compose}) words="{overrides}" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    # bash splits words at "=" and replaces only the last part.
    [[ "${{COMP_WORDBREAKS-}}" == *=* && "$current" == *=* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{current%=*}}="}}")
    [[ ${{#COMPREPLY[@]}} == 1 && "${{COMPREPLY[*]}}" == *= ]] && compopt -o nospace 2> /dev/null
    return 0
}}
complete -o default -F _nrl_lite nrl-lite
"""


def script(shell: str, verbs: Iterable[str]) -> str:
    """Return the script for one of `SHELLS`."""
    filled = _SCRIPT.format(verbs=" ".join(verbs), compose="|*:".join(_COMPOSE), overrides=" ".join(_overrides()))
    return (_ZSH if shell == "zsh" else "") + filled


def _overrides() -> Iterator[str]:
    """Yield each group with its files, and each key with its choices if it has no other values."""
    for group, files in groups().items():
        yield from (f"{group}={file}" for file in files)
    for one in entries():
        has_only_choices = not re.sub(r"`[^`]*`|, | or ", "", one.kind)
        yield from (f"{one.key}={choice}" for choice in re.findall(r"`([^`]*)`", one.kind) if has_only_choices)
        if not has_only_choices:
            yield f"{one.key}="
