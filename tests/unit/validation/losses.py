"""Losses that cannot be used, or not with every layout."""


class Unheard:
    needs = frozenset({"attention"})

    def __init__(self, options): ...

    def counts(self, rows): ...

    def __call__(self, logprobs_BT, batch, counts): ...


class Text(Unheard):
    needs = "entropy"


class Topk(Unheard):
    needs = frozenset({"topk_logits"})

    def __init__(self, options, topk: int | None = None):
        self.topk = topk


class OfTeacher(Unheard):
    needs = ("student_topk_logprobs",)


class Exits(Unheard):
    def __init__(self, options):
        raise SystemExit(0)
