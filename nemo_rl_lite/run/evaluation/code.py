"""A digest of the code of a user: a reward, an environment or an agent of the same name may have changed."""

import ast
import importlib.util
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path

import nemo_rl_lite
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.user_code import file_of
from nemo_rl_lite.rewards.judge import terms_of

_OURS, _PYTHON = Path(nemo_rl_lite.__file__).parent, Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def code_digests(config: Config) -> dict[str, str]:
    """The keys that name a user's code -> a digest of its source, and of what that imports of the user's modules. What
    is of this package, of Python, or installed has none."""
    paths = {f"{term.section}.name": term.name for term in terms_of(config.reward)}
    paths |= {"environment.name": config.environment.name or "", "agent.name": config.agent.name or ""}
    if config.environment.name == "tools":
        paths |= {f"environment.kwargs.tools, {path}": path for path in config.environment.kwargs["tools"]}
    sources = {key: _sources(path) for key, path in paths.items() if "." in path}
    return {key: _digest(files) for key, files in sources.items() if files}


def _digest(files: set[Path]) -> str:
    return sha256(b"".join(sorted(sha256(file.read_bytes()).digest() for file in files))).hexdigest()[:8]


def _sources(path: str) -> set[Path]:
    """The files of the user's modules that are imported with what `path` names. Names that a module computes while it
    runs are not followed."""
    file, name = file_of(path), path.rpartition(".")[0]
    found, waiting = set[Path](), [(file, "")] if file else list(_modules(name))
    while waiting:
        file, package = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [each for one in _imports(file, package) for each in _modules(one)]
    return found


def _modules(name: str) -> Iterator[tuple[Path, str]]:
    """The files of a module and of the packages around it, each with the package that its relative imports begin at;
    none where they are not the user's. The packages around a module are imported."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except (Exception, SystemExit):  # a user's package may raise anything while it is imported
            return
        if spec is None or not _is_users(spec):
            return
        if spec.origin is not None:
            yield Path(spec.origin), spec.parent or ""
        if spec.submodule_search_locations is None:
            return


def _is_users(spec: ModuleSpec) -> bool:
    places = [Path(place) for place in (spec.submodule_search_locations or [spec.origin or ""])]
    kept = (place.is_relative_to(_OURS) or place.is_relative_to(_PYTHON) for place in places)
    source = spec.origin is None or spec.origin.endswith(".py")
    return source and not any(kept) and not any(_INSTALLED.intersection(place.parts) for place in places)


def _imports(file: Path, package: str) -> Iterator[str]:
    """The dotted names that a file imports, anywhere in it. Each may be a module, or a name in one."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # its import will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*around, *([node.module] if node.module else [])])
            yield from (f"{module}.{one.name}" for one in node.names)
