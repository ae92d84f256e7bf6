"""Tests in another process mean what they mean in the program's: values, objects, errors and calls back."""

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.rewards.program import is_apart, passes_tests

POINT = "class P:\n  def __init__(s, x): s.x = x\n"
# Program and tests that it passes.
PASS = {
    "a list": ("def f(a): return sorted(a)", "assert f([3, 1]) == [1, 3]"),
    "a list in place": ("def f(a): a.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
    "lists in a list": (
        "def f(m): [r.reverse() for r in m]",
        "r = [1, 2]\nm = [r, [3]]\nf(m)\nassert m == [[2, 1], [3]] and r == [2, 1]",
    ),
    "a dict, a set and a deque in place": (
        "def f(d, s, q): d['a'] = 1; s.add(2); q.append(3)",
        "from collections import deque\nd, s, q = {}, {1}, deque()\nf(d, s, q)\n"
        "assert (d, s, list(q)) == ({'a': 1}, {1, 2}, [3])",
    ),
    "keys of many types": (
        "def f(): return {(1, 2): [3], None: 1.5, b'x': {4}}",
        "assert f()[1, 2] == [3] and f()[b'x'] == {4}",
    ),
    "a Counter": ("from collections import Counter as f", "assert f('aab') == {'a': 2, 'b': 1}"),
    "a defaultdict": (
        "from collections import defaultdict\ndef f():\n  d = defaultdict(list)\n  d[1].append(2)\n  return d",
        "assert f() == {1: [2]} and f()[5] == []",
    ),
    "a Decimal and a Fraction": (
        "from decimal import Decimal as D\nfrom fractions import Fraction as F\ndef f(): return D('1.50'), F(2, 4)",
        "from decimal import Decimal\nassert f() == (Decimal('1.5'), 0.5)",
    ),
    "dates": (
        "from datetime import *\ndef f(d): return d + timedelta(1)",
        "from datetime import date, datetime\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)\n"
        "assert f(datetime.min).day == 2",
    ),
    "numbers": (
        "def f(): return 7**9000, float('inf'), float('nan'), 1j, -0.0, 0.1 + 0.2",
        "a, b, c, d, e, g = f()\nassert (a, b, d, g) == (7**9000, float('inf'), 1j, 0.1 + 0.2)\n"
        "assert c != c and str(e) == '-0.0'",
    ),
    "texts": (
        "def f(s): return s[::-1], s.encode()",
        "assert f('a\u00e4\U0001f600') == ('\U0001f600\u00e4a', 'a\u00e4\U0001f600'.encode())",
    ),
    "ranges and slices": ("def f(): return range(3), slice(1, 2), ...", "assert f() == (range(3), slice(1, 2), ...)"),
    "an array": (
        "import numpy as np\ndef f(a): return a * 2",
        "import numpy as np\nassert np.allclose(f(np.ones(2)), 2) and (f(np.ones(2)) == 2).all()",
    ),
    "an array in place": ("def f(a): a[0] = 5", "import numpy as np\na = np.zeros(2)\nf(a)\nassert a[0] == 5"),
    "a number of numpy": ("import numpy as np\ndef f(a): return np.mean(a)", "assert f([1, 2]) == 1.5"),
    "a generator": ("def f():\n  yield 1", "assert list(f()) == [1]\ng = f()\nassert next(g) == 1 and next(g, 2) == 2"),
    "iterators": ("def f(a): return zip(a, map(str, reversed(a)))", "assert list(f([1, 2])) == [(1, '2'), (2, '1')]"),
    "views": (
        "def f(d): return d.keys(), d.values()",
        "k, v = f({'a': 1})\nassert k == {'a'} and list(v) == [1] and 'a' in k",
    ),
    "an error": (
        "def f(): raise ValueError('negative', 1)",
        "try: f()\nexcept ValueError as e: assert e.args == ('negative', 1)\nelse: raise SystemExit",
    ),
    "an error of its own": (
        "class E(KeyError):\n  def __init__(s, code): super().__init__('x'); s.code = code\ndef f(): raise E(5)",
        "try: f()\nexcept E as e: assert e.code == 5 and isinstance(e, LookupError)\nelse: raise SystemExit",
    ),
    "pytest.raises": ("def f(): return {}[1]", "import pytest\nwith pytest.raises(KeyError, match='1'): f()"),
    "unittest": (
        "def f(x): return [x]",
        "import unittest\nclass T(unittest.TestCase):\n  def test(s): s.assertEqual(f(1), [1])\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
    ),
    "an object": (
        POINT + "  def up(s): s.x += 1",
        "p = P(1)\np.up()\nassert p.x == 2\np.x = 7\nassert p.x == 7 and type(p) is P",
    ),
    "objects that refer to objects": (
        "class N:\n  def __init__(s, v, n=None): s.v, s.n = v, n\n"
        "def f(h):\n  p = None\n  while h: h.n, p, h = p, h, h.n\n  return p",
        "r = f(N(1, N(2)))\nassert r.v == 2 and r.n.v == 1 and r.n.n is None",
    ),
    "objects of the tests": ("def f(p): p.y = p.x + 1; return p", POINT + "p = P(1)\nassert f(p) is p and p.y == 2"),
    "operators": (
        POINT + "  def __add__(s, o): return P(s.x + o.x)\n  def __mul__(s, k): return P(s.x * k)\n"
        "  def __eq__(s, o): return s.x == o.x\n  def __hash__(s): return s.x\n  def __repr__(s): return f'<{s.x}>'",
        "assert P(1) + P(2) == P(3) and P(2) * 3 == P(6) != P(5) and str(P(1)) == '<1>' and len({P(1), P(1)}) == 1",
    ),
    "an order": (
        POINT + "  def __lt__(s, o): return s.x < o.x",
        "assert [p.x for p in sorted([P(2), P(1)])] == [1, 2]",
    ),
    "a container": (
        "class C:\n  def __len__(s): return 2\n  def __getitem__(s, i): return [4, 5][i]\n"
        "  def __contains__(s, x): return x == 4",
        "c = C()\nassert len(c) == 2 and c[1] == 5 and 4 in c and list(c) == [4, 5] and bool(c)",
    ),
    "a list of its own": (
        "class S(list):\n  push = list.append",
        "s = S()\ns.push(1)\ns += [2]\nassert s == [1, 2] and len(s) == 2",
    ),
    "an int of its own": (
        "class M(int):\n  def __add__(s, o): return M((int(s) + int(o)) % 7)",
        "assert M(5) + 4 == 2",
    ),
    "a namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')",
        "assert P(1, 2) == (1, 2) and P(1, 2).y == 2",
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\ndef f(): return P(1)",
        "assert f() == P(1)",
    ),
    "an enumeration": (
        "from enum import Enum\nclass C(Enum):\n  R = 1\n  G = 2",
        "assert C.R is C(1) and C.R.value == 1 and C['G'] != C.R and [c.name for c in C] == ['R', 'G']",
    ),
    "class attributes": (
        "class A:\n  K = 3\n  @classmethod\n  def make(c): return c()\nclass B(A): pass",
        "assert B.K == 3 and isinstance(B.make(), A)",
    ),
    "a context": (
        "class C:\n  def __enter__(s): return 5\n  def __exit__(s, *e): return True",
        "with C() as x:\n  assert x == 5\n  raise ValueError",
    ),
    "a property": (POINT + "  @property\n  def twice(s): return 2 * s.x", "assert P(2).twice == 4"),
    "functions as arguments": (
        "def f(g, a): return [g(x) for x in a]",
        "assert f(lambda x: 2 * x, [1]) == [2] and f(len, ['a']) == [1]",
    ),
    "functions as results": ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3 and callable(f(1))"),
    "errors of functions as arguments": (
        "def f(g):\n  try: g()\n  except KeyError: return 1",
        "def g(): raise KeyError\nassert f(g) == 1",
    ),
    "keywords": (
        "def f(a, /, *b, c=1, **d): return [a, b, c, d]",
        "assert f(1, 2, c=3, e=4) == [1, (2,), 3, {'e': 4}]",
    ),
    "a global that changes": ("n = 0\ndef f():\n  global n\n  n += 1", "f(); f()\nassert n == 2"),
    "modules of the program": ("import math\nfrom math import pi", "assert math.isclose(math.pi, pi)"),
    "what is printed": (
        "def f(): print('a')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out: f()\n"
        "assert out.getvalue() == 'a\\n'",
    ),
    "a file": ("def f(): open('a', 'w').write('b')", "f()\nassert open('a').read() == 'b'"),
    "a copy": (POINT, "import copy\np = P([1])\nq = copy.deepcopy(p)\nq.x = 2\nassert p.x == [1]"),
    "a function named like Python's": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "a variable called input": ("def f(x): return x", "for input, seed in [(1, 1)]: assert f(input) == seed"),
    "an attribute called input": (
        "def f(x): return x",
        "from types import SimpleNamespace as C\nfor c in [C(input=1, output=1)]: assert f(c.input) == c.output",
    ),
    "names of a function": ("def f(): pass", "assert f.__name__ == 'f' and f() is None"),
}


@pytest.mark.parametrize("name", PASS)
def test_right_programs_pass(name):
    program, tests = PASS[name]
    assert is_apart(tests)
    assert passes_tests(program, "", Problem(chat("?"), "", {"tests": tests}), memory_mib=256) == 1.0


TOGETHER = {
    "coroutines": ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
    "subclasses": (POINT, "class Q(P):\n  def y(s): return s.x\nassert Q(1).y() == 1"),
    "patches": (
        "import time\ndef f(): return time.time()",
        "from unittest import mock\nwith mock.patch('time.time', lambda: 1): assert f() == 1",
    ),
    "standard input": ("def f(): return input()", "import io, sys\nsys.stdin = io.StringIO('a')\nassert f() == 'a'"),
    "a seed": (
        "import random\ndef f(): return random.random()",
        "import random\nrandom.seed(1)\na = f()\nrandom.seed(1)\nassert a == f()",
    ),
    "signatures": ("def f(x): 'text'", "import inspect\nassert list(inspect.signature(f).parameters) == ['x']"),
    "documentation": ("def f(x): 'text'", "assert f.__doc__ == 'text'"),
    "other packages": ("def f(x): return x.parameters", "import psutil\nassert psutil and f"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_tests_that_need_the_programs_process_run_there(name):
    program, tests = TOGETHER[name]
    program = program.replace("return x.parameters", "return x")
    assert not is_apart(tests)
    problem = Problem(chat("?"), "", {"tests": tests})
    assert passes_tests(program, "", problem, memory_mib=256) == 1.0
    assert passes_tests("def f(): raise KeyError", "", problem, memory_mib=256) == float(name == "other packages")
