"""Wrong programs whose objects, libraries or callbacks answer for them get no reward from tests of many forms."""

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.rewards.program import passes_tests

A = "class A:\n  def __eq__(s,o): return True\n  __hash__=None\n"
# Program and tests.
WRONG = {
    "eq in tuple": (A + "def f(x): return (A(),A())", "assert f(1)==(1,2)"),
    "eq in dict": (A + "def f(x): return {'a':A()}", "assert f(1)=={'a':1}"),
    "eq in set": (
        "class A:\n  def __eq__(s,o): return True\n  def __hash__(s): return hash(2)\ndef f(x): return {A()}",
        "assert f(1)=={2}",
    ),
    "dict subclass": (
        "class D(dict):\n  def __eq__(s,o): return True\n  def __getitem__(s,k): return A()\n"
        + A
        + "def f(x): return D()",
        "assert f(1)=={'a':1}",
    ),
    "tuple subclass": (
        "class D(tuple):\n  def __eq__(s,o): return True\n  def __len__(s): return 2\ndef f(x): return D()",
        "assert f(1)==(1,2)",
    ),
    "str subclass": (
        "class D(str):\n  def __eq__(s,o): return True\n  def strip(s): return s\n"
        "  def lower(s): return s\ndef f(x): return D('q')",
        "assert f(1).strip().lower()=='abc'",
    ),
    "float nan": ("def f(x): return float('nan')", "assert not abs(f(1)-2) > 1e-6 and f(1)==2"),
    "exception eq": (
        "class A(Exception):\n  def __eq__(s,o): return True\n  __hash__=None\ndef f(x): raise A()",
        "try: f(1)\nexcept Exception as e: assert e=='x'",
    ),
    "exc args": (A + "def f(x): raise ValueError(A())", "try: f(1)\nexcept ValueError as e: assert e.args==('bad',)"),
    "getattr eq": (A + "class O: pass\ndef f(x):\n  o=O(); o.val=A(); return o", "assert f(1).val==2"),
    "method eq": (A + "class S:\n  def g(s,x): return A()", "assert S().g(1)==2"),
    "method self": (
        "class S:\n  def __eq__(s,o): return True\n  __hash__=None\n  def g(s,x): return s",
        "assert S().g(1)==2",
    ),
    "counter patched": (
        "import collections\nclass C(collections.Counter):\n"
        "  def __eq__(s,o): return True\ncollections.Counter=C\ndef f(x): return C('a')",
        "from collections import Counter\nassert f(1)==Counter('b')",
    ),
    "decimal sub": (
        "from decimal import Decimal\nclass D(Decimal):\n  def __eq__(s,o): return True\ndef f(x): return D(3)",
        "from decimal import Decimal\nassert f(1)==Decimal(4)",
    ),
    "fraction sub": (
        "from fractions import Fraction\nclass D(Fraction):\n  def __eq__(s,o): return True\ndef f(x): return D(3)",
        "assert f(1)==4",
    ),
    "date sub": (
        "from datetime import date\nclass D(date):\n  def __eq__(s,o): return True\ndef f(x): return D(2000,1,1)",
        "from datetime import date\nassert f(1)==date(2001,1,1)",
    ),
    "np sub": (
        "import numpy as np\nclass N(np.ndarray):\n"
        "  def __eq__(s,o): return np.array([True])\ndef f(x): return np.zeros(1).view(N)",
        "import numpy as np\nassert (f(1)==np.ones(1)).all()",
    ),
    "np array_equal": (
        "import numpy as np\nclass N:\n  def __array__(s,*a,**k): return np.zeros(1)\n"
        "  def __eq__(s,o): return True\ndef f(x): return N()",
        "import numpy as np\nassert np.array_equal(f(1),[1])",
    ),
    "np patched": (
        "import numpy as np\nnp.allclose=np.array_equal=lambda *a,**k: True\ndef f(x): return 0",
        "import numpy as np\nassert np.allclose(f(1),2)",
    ),
    "pytest approx": (
        "class A:\n  def __sub__(s,o): return 0\n  __rsub__=__sub__\n"
        "  def __eq__(s,o): return True\n  def __abs__(s): return 0\ndef f(x): return A()",
        "import pytest\nassert f(1)==pytest.approx(2)",
    ),
    "pytest approx patched": (
        "try:\n  import pytest\n  pytest.approx=lambda *a,**k: 0\nexcept ImportError: pass\ndef f(x): return 0",
        "import pytest\nassert f(1)==pytest.approx(2)",
    ),
    "assertEqual": (A + "def f(x): return A()", "import unittest\nt=unittest.TestCase()\nt.assertEqual(f(1),2)"),
    "assertAlmost": (
        "class A:\n  def __sub__(s,o): return 0\n  __rsub__=__sub__\n  def __eq__(s,o): return True\n"
        "  def __abs__(s): return 0\n  def __round__(s,n=0): return 0\ndef f(x): return A()",
        "import unittest\nt=unittest.TestCase()\nt.assertAlmostEqual(f(1),2)",
    ),
    "iter eq": (
        A + "class G:\n  def __iter__(s): return iter([A(),A()])\ndef f(x): return G()",
        "assert list(f(1))==[1,2]",
    ),
    "sorted": (A + "def f(x): return [A()]", "assert sorted(f(1))==[1]"),
    "set op": (
        "class S(set):\n  def __eq__(s,o): return True\n  def __sub__(s,o): return set()\ndef f(x): return S([9])",
        "assert not (f(1)-{1})",
    ),
    "len trick": (
        "class S:\n  def __len__(s): return 0\n  def __iter__(s): return iter([])\ndef f(x): return S()",
        "assert len(f(1))==2",
    ),
    "bool eq": (
        "class B:\n  def __bool__(s): return True\n  def __eq__(s,o): return s\n"
        "  def __ne__(s,o): return False\ndef f(x): return B()",
        "assert (f(1)==False)",
    ),
    "property": (
        "class P:\n  @property\n  def val(s): return A()\n" + A + "def f(x): return P()",
        "assert f(1).val==2",
    ),
    "kill tests by recursion": ("def f(g): return g(g)", "def g(x): return f(g)\nassert f(g)==2"),
    "steal by callback": ("def f(g):\n  return g.__globals__['expected']", "expected=5\ndef g(): pass\nassert f(g)==5"),
    "steal by callback2": (
        "def f(g):\n  return g.__code__.co_consts",
        "expected=5\ndef g(): return 5\nassert f(g)==(None,5)",
    ),
    "steal class attr": (
        "def f(c):\n  return c.__init__.__globals__['expected']",
        "class C:\n  def __init__(s): s.x=1\nexpected=5\nassert f(C())==5",
    ),
    "gen frame": (
        "def f(g):\n  return g.gi_frame.f_globals['expected']",
        "def g(): yield 1\nexpected=5\nassert f(g())==5",
    ),
    "set __class__": (
        "def f(c):\n  c.__class__.__eq__=lambda s,o: True\n  return c",
        "class C:\n  pass\nassert f(C())==5",
    ),
    "set attr cb": (
        "def f(c):\n  type(c).same=lambda s,o: True\n  return c",
        "class C:\n  def same(s,o): return o==1\nassert f(C()).same(2)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_fail(name):
    program, tests = WRONG[name]
    assert passes_tests(program, "", Problem(chat("?"), "", {"tests": tests}), memory_mib=256) == 0.0
