"""The KL penalty in the reward: by hand, against verl's and TRL's formulas, and its gradient over all responses."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.losses.grpo import GRPOLoss, less_kl_to_go
from nemo_rl_lite.losses.interface import count_masked
from tests.unit.losses.batches import batch_of, loss_config, rows_of
from tests.unit.losses.test_losses_match_trl import TOLERANCE, our_loss, random_inputs

TOKENS, LENGTH, BETA = 2, 3, 0.3


def test_a_token_loses_the_kl_from_it_on():
    advantages = torch.tensor([[2.0], [-1.0]])
    # The second token of the first row was an environment's, and the second row ends early.
    kl = torch.tensor([[0.4, 9.0, -0.2, 0.6], [0.5, 0.1, torch.nan, torch.inf]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    found = less_kl_to_go(advantages, kl, mask, 0.5)
    expected = torch.tensor([[1.6, 1.8, 1.8, 1.7], [-1.3, -1.05, -1.0, -1.0]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_that_of_these_advantages_alone(kind, seed):
    """Token by token: the clip with the advantage of each, and no other term; the KL has no gradient."""
    inputs = random_inputs(seed)
    config = loss_config(use_kl_in_reward=True, reference_policy_kl_penalty=BETA, reference_policy_kl_type=kind)
    logprobs = inputs["logprobs"].clone().requires_grad_()
    terms, kls = [], []
    for row, mask in enumerate(inputs["mask"]):
        places = mask.nonzero().flatten().tolist()
        d = {t: (inputs["reference_logprobs"] - inputs["previous_logprobs"])[row, t] for t in places}
        kl = {t: {"k1": -d[t], "k2": d[t] ** 2 / 2, "k3": d[t].exp() - 1 - d[t]}[kind] for t in places}
        for t in places:
            advantage = inputs["advantages"][row] - BETA * sum(kl[later] for later in places if later >= t)
            ratio = (logprobs[row, t] - inputs["previous_logprobs"][row, t]).exp()
            terms.append(torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)))
        kls += kl.values()
    expected = sum(terms) / len(terms)
    expected.backward()
    ours, gradient = our_loss(config, inputs)
    torch.testing.assert_close(ours, expected.detach(), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(gradient, logprobs.grad, atol=TOLERANCE, rtol=TOLERANCE)
    _, metrics = GRPOLoss(config)(inputs["logprobs"], batch_of(inputs), count_masked(rows_of(inputs["mask"])))
    torch.testing.assert_close(metrics["kl_penalty"], sum(kls) / len(kls), atol=TOLERANCE, rtol=TOLERANCE)


def test_advantages_are_verls_returns():
    """verl's `apply_kl_penalty`, and its `reinforce_plus_plus` with gamma = 1, before that normalises: the score is the
    last token's reward, each token's reward is less beta times its KL, and a return adds up the rewards from its token
    on."""
    inputs = random_inputs(rows=5)
    mask, kl = inputs["mask"], inputs["previous_logprobs"] - inputs["reference_logprobs"]
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)
    score_at_last = torch.where(last & (mask > 0), inputs["advantages"][:, None], 0.0)
    rewards = score_at_last - BETA * kl * mask
    returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = (rewards[:, t] + running) * mask[:, t]
        returns[:, t] = running
    ours = less_kl_to_go(inputs["advantages"][:, None], kl, mask, BETA)
    torch.testing.assert_close(ours * mask, returns, atol=TOLERANCE, rtol=TOLERANCE)


class Responses:
    """All responses of `LENGTH` tokens out of `TOKENS`, under a policy with logits of its own after each beginning."""

    def __init__(self, moved: float):
        source = torch.Generator().manual_seed(0)
        beginnings = [begun for length in range(LENGTH) for begun in product(range(TOKENS), repeat=length)]
        self._place = {begun: place for place, begun in enumerate(beginnings)}
        shape = (len(beginnings), TOKENS)
        self.reference = torch.randn(shape, generator=source, dtype=torch.float64)
        change = moved * torch.randn(shape, generator=source, dtype=torch.float64)
        self.logits = (self.reference + change).requires_grad_()
        self.all = list(product(range(TOKENS), repeat=LENGTH))
        self.rewards = torch.randn(len(self.all), generator=source, dtype=torch.float64)

    def logprobs(self, logits: torch.Tensor, response: tuple[int, ...]) -> torch.Tensor:
        of_all = logits.log_softmax(-1)
        return torch.stack([of_all[self._place[response[:t]], token] for t, token in enumerate(response)])[None]

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.logits)[0]

    def mean_gradient(self, loss_of) -> torch.Tensor:
        """The mean over on-policy samples of the gradient of `loss_of(reward, current, reference)`."""
        total = torch.zeros_like(self.logits)
        for response, reward in zip(self.all, self.rewards, strict=True):
            current = self.logprobs(self.logits, response)
            loss = loss_of(reward, current, self.logprobs(self.reference, response))
            total += current.detach().sum().exp() * self.gradient(loss)
        return total

    def objective(self) -> torch.Tensor:
        """The mean reward, less beta times the KL of whole responses to the reference."""
        total = torch.zeros((), dtype=torch.float64)
        for response, reward in zip(self.all, self.rewards, strict=True):
            current = self.logprobs(self.logits, response).sum()
            total = total + current.exp() * (reward - BETA * (current - self.logprobs(self.reference, response).sum()))
        return total


def of_ours(kind: str):
    config = loss_config(
        use_kl_in_reward=True,
        reference_policy_kl_type=kind,
        reference_policy_kl_penalty=BETA,
        policy_loss="reinforce",
        token_level_loss="constant",
        constant_length=1,
    )

    def loss_of(reward, current, reference):
        known = {"previous_logprobs": current.detach(), "generation_logprobs": current.detach()}
        known |= {"reference_logprobs": reference, "advantages": reward[None], "mask": torch.ones_like(current)}
        return GRPOLoss(config)(current, batch_of(known), count_masked(rows_of(known["mask"])))[0]

    return loss_of


def of_trl(reward, current, reference):
    """TRL's own loss of RLOO, of the reward less beta times the sum of k1 over the response, as TRL makes it."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    unchanged = lambda value, **_: value  # noqa: E731
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather=unchanged, reduce=unchanged, gather_for_metrics=unchanged),
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, torch.zeros_like(current), None),
    )
    ids, ones = torch.zeros(current.shape, dtype=torch.long), torch.ones_like(current)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ones,
        "completion_ids": ids,
        "completion_mask": ones,
        "advantages": reward[None] - BETA * (current.detach() - reference).sum(1),
        "old_logps": current.detach().sum(1),
    }
    return RLOOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("loss_of", [of_ours("k1"), of_trl], ids=["ours", "TRL"])
def test_the_mean_gradient_is_that_of_the_reward_less_the_kl(loss_of):
    responses = Responses(moved=0.5)
    expected = -responses.gradient(responses.objective())
    torch.testing.assert_close(responses.mean_gradient(loss_of), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_near_the_reference_only_k1_pulls_back(kind):
    """Which is why a run is told that the others hardly hold the policy."""
    responses = Responses(moved=0.05)
    responses.rewards.zero_()
    size = {name: responses.mean_gradient(of_ours(name)).norm().item() for name in ("k1", kind)}
    assert 0 < size[kind] < 0.2 * size["k1"]
