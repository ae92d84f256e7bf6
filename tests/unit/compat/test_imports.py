import gc
import importlib.metadata

from nemo_rl_lite.compat import imports


def test_the_table_of_distributions_is_made_for_an_unusual_name_alone(monkeypatch):
    made, whole = [], {"torch": ["torch"], "yaml": ["PyYAML"]}
    monkeypatch.setattr(imports, "_packages_distributions", lambda: made.append(1) or whole)
    with imports.quick_imports():
        assert not gc.isenabled()
        found = importlib.metadata.packages_distributions()
        assert found["torch"] == ["torch"] and not made
        assert dict(found) == whole and "no_such_package" not in found and len(made) == 1
    assert gc.isenabled() and importlib.metadata.packages_distributions() is whole
