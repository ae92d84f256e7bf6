"""Make the loss of a run: the algorithm's own, or a user's by its dotted path or file."""

import inspect
from collections.abc import Set
from typing import Any, get_args

from nemo_rl_lite.config.algorithms import ALGORITHMS
from nemo_rl_lite.config.schema_algorithm import AlgorithmConfig
from nemo_rl_lite.config.user_code import imported, own_name
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.losses.interface import Loss, Need


def make_loss(options: AlgorithmConfig) -> Loss:
    """Make the loss of a run with these options of its algorithm.

    Raises:
        ConfigError: `algorithm.loss` cannot be imported, called with `algorithm.loss_kwargs`, or used as a `Loss`, or
            makes another algorithm's.
    """
    path = options.loss or ALGORITHMS[options.name].loss
    try:
        factory = imported(path)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        fix = "give package.module.Class or path/to/file.py:Class that can be imported, or algorithm.loss=null"
        raise _error("loss", path, f"cannot be imported: {type(error).__name__}: {error}", fix) from error
    if not callable(factory):
        raise _error("loss", path, "cannot be called", "name a class or a function that returns a loss")
    try:
        signature = inspect.signature(factory)
        signature.bind(options, **options.loss_kwargs)
        loss = factory(options, **options.loss_kwargs)
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        cause = f"{type(error).__name__}: {error}"
        called = f"{own_name(path)}(options, **algorithm.loss_kwargs), where options are the keys below `algorithm`"
        fix = f"it is called as {called}"
        if options.loss_kwargs:
            raise _error("loss_kwargs", dict(options.loss_kwargs), f"do not fit {path}: {cause}", fix) from error
        raise _error("loss", path, f"cannot be made: {cause}", fix) from error
    _check(path, loss)
    asked = next(iter(signature.parameters.values())).annotation
    if isinstance(asked, type) and issubclass(asked, AlgorithmConfig) and not isinstance(options, asked):
        rule = f"is made from {asked.__name__}, and this run is algorithm={options.name}"
        raise _error("loss", path, rule, "set the algorithm whose loss it is, or algorithm.loss=null")
    return loss


def _check(path: str, loss: Any) -> None:
    """Raise ConfigError where `loss` is not a `Loss`."""
    fix = "see the protocol Loss in nemo_rl_lite/losses/interface.py"
    missing = [name for name in ("__call__", "counts") if not callable(getattr(loss, name, None))]
    if missing:
        raise _error("loss", path, f"makes a {type(loss).__name__} without {' and '.join(missing)}", fix)
    for name, count in (("__call__", 3), ("counts", 1)):
        try:
            inspect.signature(getattr(loss, name)).bind(*range(count))
        except TypeError as error:
            raise _error("loss", path, f"has a {name} that is called with {count} arguments: {error}", fix) from None
        except ValueError:  # a function of C code has no signature
            continue
    needs = getattr(loss, "needs", ())
    if not isinstance(needs, Set | tuple | list):
        rule, fix = f"has needs = {needs!r}, which is no tuple", f"needs = ({get_args(Need)[0]!r},), or such a tuple"
        raise _error("loss", path, rule, fix)
    if unknown := sorted(map(str, set(needs) - set(get_args(Need)))):
        raise _error("loss", path, f"needs {', '.join(unknown)}", f"a loss can need {' and '.join(get_args(Need))}")
    if not callable(summarize := getattr(loss, "summarize", dict)):
        raise _error("loss", path, f"has summarize = {summarize!r}, which cannot be called", fix)
    topk = getattr(loss, "topk", None)
    if "topk_logits" in needs and (not isinstance(topk, int) or topk < 1):
        raise _error("loss", path, f"needs topk_logits and has no int `topk` above 0, but {topk!r}", fix)


def _error(key: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError([Violation(f"algorithm.{key}", value, rule, fix)])
