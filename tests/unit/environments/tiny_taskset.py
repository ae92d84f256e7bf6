"""Taskset of verifiers 0.4: reverse digits. One task's reward fails."""

import verifiers.v1 as vf

__all__ = ["Digits"]


class Data(vf.TaskData):
    answer: str


class Reverse(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, task: Data, trace: vf.Trace) -> float:
        if task.answer == "fail":
            raise ValueError("the board is broken")
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.reward(weight=0.25)
    async def digits(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit())


class Digits(vf.Taskset[Reverse, vf.TasksetConfig]):
    def load(self):
        for prompt, answer in (("123", "321"), ("456", "fail")):
            yield Reverse(Data(prompt=prompt, answer=answer), self.config.task)
