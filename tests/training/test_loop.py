"""The trainer against an AdamW written out, resuming, averages, carried arrays, two networks, budget and log."""

import json
import math
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from training.loop import Budget, DivergedError, Every, Log, Trainer


class Net(nn.Module):
    """A matrix, a bias, a list, and a statistic that the loss replaces."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        self.weight = mx.array(draw.standard_normal((3, 4)), mx.float32)
        self.layers = [
            mx.array(draw.standard_normal(4), mx.float32),
            mx.array(draw.standard_normal((4, 2)), mx.float32),
        ]
        self.mean = mx.zeros((3,))
        self.count = mx.array(0, mx.int32)
        self._hidden = mx.ones((2,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.tanh(x @ self.weight + self.layers[0]) @ self.layers[1]


def loss(net: Net, x: mx.array, y: mx.array) -> dict[str, mx.array]:
    net.mean = 0.9 * net.mean + 0.1 * x.mean(0)
    net.count = net.count + 1
    out = net(x)
    return {"fit": mx.square(out - y).mean(), "small": 0.01 * mx.square(out).mean(), "_seen": out.max(), "_out": out}


def noisy(net: Net, x: mx.array, y: mx.array) -> dict[str, mx.array]:
    return {"fit": mx.square(net(x + 0.1 * mx.random.normal(x.shape)) - y).mean()}


def frozen(name: str, value: mx.array) -> bool:
    return name == "mean"


def batch(seed: int) -> tuple[mx.array, mx.array]:
    draw = np.random.default_rng(seed)
    return mx.array(draw.standard_normal((5, 3)), mx.float32), mx.array(draw.standard_normal((5, 2)), mx.float32)


def weights(net: nn.Module) -> list[np.ndarray]:
    return [np.array(net.weight), np.array(net.layers[0]), np.array(net.layers[1])]


def by_hand(steps: int, clip: float) -> list[np.ndarray]:
    """AdamW in float64 with gradients by MLX: warm-up 4, cosine, matrices decay."""
    net = Net()
    p = [w.astype(np.float64) for w in weights(net)]
    m, v = [np.zeros_like(w) for w in p], [np.zeros_like(w) for w in p]

    def total(arrays: list[mx.array], x: mx.array, y: mx.array) -> mx.array:
        net.weight, net.layers[0], net.layers[1] = arrays
        terms = loss(net, x, y)
        return terms["fit"] + terms["small"]

    for t in range(steps):
        gradients = mx.grad(total)([mx.array(w, mx.float32) for w in p], *batch(t))
        g = [np.array(x).astype(np.float64) for x in gradients]
        norm = math.sqrt(sum((x**2).sum() for x in g))
        g = [x * min(1, clip / norm) for x in g]
        rate = 0.01 * min(1, (t + 1) / 4) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 8)))
        for i in range(3):
            m[i] = 0.9 * m[i] + 0.1 * g[i]
            v[i] = 0.95 * v[i] + 0.05 * g[i] ** 2
            step = (m[i] / (1 - 0.9 ** (t + 1))) / (np.sqrt(v[i] / (1 - 0.95 ** (t + 1))) + 1e-8)
            p[i] = p[i] - rate * (step + (0.1 * p[i] if p[i].ndim > 1 else 0))
    return p


def trainer(net: nn.Module, loss_function=loss, **options) -> Trainer:
    settings = {"peak": 0.01, "warmup": 4, "floor": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return Trainer(net, loss_function, frozen=frozen, **(settings | options))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("clip", [0.2, 100.0])
def test_equals_adamw_by_hand(compiled: bool, clip: float) -> None:
    net = Net()
    ours = trainer(net, clip=clip, compile=compiled)
    for t in range(8):
        terms = ours.step(t / 8, *batch(t))
    for found, known in zip(weights(net), by_hand(8, clip), strict=True):
        np.testing.assert_allclose(found, known, atol=2e-6)
    assert set(terms) == {"fit", "small", "_seen", "_out", "norm"}
    assert terms["_out"].shape == (5, 2)


def test_what_is_frozen_stays_and_what_the_loss_replaces_is_kept() -> None:
    net = Net()
    ours = trainer(net)
    assert ours.layout.names == ["weight", "layers.1", "layers.0"]  # matrices first; no mean, count or _hidden
    known = np.zeros(3)
    for t in range(3):
        ours.step(0.0, *batch(t))
        known = 0.9 * known + 0.1 * np.array(batch(t)[0]).mean(0)
    np.testing.assert_allclose(np.array(net.mean), known, atol=1e-6)
    assert net.count.item() == 3
    net.count = mx.array(10, mx.int32)  # what is changed from outside is seen
    ours.step(0.0, *batch(0))
    assert net.count.item() == 11


def test_underscored_terms_are_not_minimised() -> None:
    def only_seen(net: Net, x: mx.array, y: mx.array) -> dict[str, mx.array]:
        return {"zero": 0 * net(x).sum(), "_big": 100 * net(x).sum()}

    net = Net()
    ours = trainer(net, only_seen, weight_decay=0.0)
    before = weights(net)
    assert ours.step(0.0, *batch(0))["norm"].item() == 0
    assert all((a == b).all() for a, b in zip(before, weights(net), strict=True))


def test_average() -> None:
    net = Net()
    ours = trainer(net, ema=0.9)
    known = [w.copy() for w in weights(net)]
    for t in range(5):
        ours.step(0.0, *batch(t))
        keep = min(0.9, (2 + t) / (11 + t))
        known = [keep * k + (1 - keep) * w for k, w in zip(known, weights(net), strict=True)]
    current = weights(net)
    with ours.averaged() as module:
        for found, k in zip(weights(module), known, strict=True):
            np.testing.assert_allclose(found, k, atol=1e-6)
    assert all((a == b).all() for a, b in zip(current, weights(net), strict=True))
    assert not np.allclose(current[0], known[0], atol=1e-4)


def test_resumed_run_gives_the_same_numbers(tmp_path: Path) -> None:
    whole = trainer(Net(), noisy, ema=0.99, seed=7)
    for t in range(6):
        if t == 3:
            whole.save(tmp_path, used={"steps": 3})
        whole.step(t / 6, *batch(t))
    mx.random.seed(123)
    resumed = trainer(Net(seed=5), noisy, ema=0.99, seed=7)
    assert resumed.resume(tmp_path) == {"used": {"steps": 3}}
    for t in range(3, 6):
        resumed.step(t / 6, *batch(t))
    assert resumed.steps == 6
    assert mx.array_equal(resumed.weights, whole.weights)
    with whole.averaged() as a, resumed.averaged() as b:
        assert all((x == y).all() for x, y in zip(weights(a), weights(b), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["trainer.safetensors"]


def test_resuming_fills_the_module(tmp_path: Path) -> None:
    whole, net = trainer(Net()), Net(seed=5)
    for t in range(3):
        whole.step(0.0, *batch(t))
    whole.save(tmp_path)
    trainer(net).resume(tmp_path)
    assert all((a == b).all() for a, b in zip(weights(net), weights(whole.module), strict=True))
    assert mx.array_equal(net.mean, whole.module.mean)
    assert net.count.item() == 3


def test_draws_outside_do_not_change_those_inside() -> None:
    one, other = (trainer(Net(), noisy, seed=1) for _ in range(2))
    for t in range(2):
        found = [one.step(0.0, *batch(t))["fit"].item()]
        outside = mx.random.normal((5, 3))
        found.append(other.step(0.0, *batch(t))["fit"].item())
        assert found[0] == found[1]
    mx.random.seed(1 << 32 | 2 * 1)
    assert not mx.array_equal(outside, mx.random.normal((5, 3)))  # nor are they the same numbers


def test_seed_changes_what_is_drawn() -> None:
    one, other = (trainer(Net(), noisy, seed=s) for s in (1, 2))
    assert one.step(0.0, *batch(0))["fit"].item() != other.step(0.0, *batch(0))["fit"].item()


def test_resume_refuses_another_model(tmp_path: Path) -> None:
    trainer(Net()).save(tmp_path)
    with pytest.raises(ValueError, match="another model"):
        trainer(Net(), ema=0.9).resume(tmp_path)


def test_half_rounds_what_the_loss_sees_and_keeps_float32_masters() -> None:
    seen = {}

    def look(net: Net, x: mx.array, y: mx.array) -> dict[str, mx.array]:
        seen.update(weight=net.weight.dtype, bias=net.layers[0].dtype, second=net.layers[1].dtype)
        return {"fit": mx.square(net(x).astype(mx.float32) - y).mean()}

    net = Net()
    ours = trainer(net, look, half=lambda name, value: name == "layers.1")
    assert ours.layout.names == ["layers.1", "weight", "layers.0"]
    exact = trainer(Net(), look)
    for t in range(4):
        exact.step(0.0, *batch(t))
        ours.step(0.0, *batch(t))
        if t == 0:  # what was traced last
            assert seen == {"weight": mx.float32, "bias": mx.float32, "second": mx.bfloat16}
    assert net.layers[1].dtype == mx.float32
    np.testing.assert_allclose(np.array(net.weight), np.array(exact.module.weight), atol=3e-3)


def test_second_network_inside_the_first_ones_loss() -> None:
    """A critic's weights come with the batch: its new ones are seen, and it gets no gradient."""
    critic_net = Net(seed=1)
    critic = trainer(critic_net)

    def judged(net: Net, flat: mx.array, x: mx.array) -> dict[str, mx.array]:
        with critic.using(flat) as judge:
            return {"judged": mx.square(judge(x * net.mean.sum() + net(x) @ mx.ones((2, 3)))).mean()}

    net = Net()
    ours = trainer(net, judged, weight_decay=0.0)
    first = ours.step(0.0, critic.weights, batch(0)[0])["judged"].item()
    stood = weights(critic_net)
    known = np.mean(np.square(np.array(critic_net(Net()(batch(0)[0]) @ mx.ones((2, 3))))))
    assert first == pytest.approx(float(known), rel=1e-5)
    assert all((a == b).all() for a, b in zip(stood, weights(critic_net), strict=True))
    critic.edit(lambda module: module.update({"weight": 0 * module.weight, "layers": [0 * w for w in module.layers]}))
    assert ours.step(0.0, critic.weights, batch(0)[0])["judged"].item() == 0


def test_optimizer_is_few_primitives(tmp_path: Path) -> None:
    """What comes on top of the loss does not grow with the number of weights, but for one concatenation's inputs."""

    class Many(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.rows = [mx.ones((2, 2)) for _ in range(count)]

    def product(module: Many) -> dict[str, mx.array]:
        return {"sum": mx.concatenate(module.rows).sum()}

    def kernels(count: int) -> int:
        ours = Trainer(Many(count), product, ema=0.9)
        mx.export_to_dot(str(tmp_path / "g.dot"), ours._run(ours._state, [], mx.zeros((4,)), ()))
        primitives = re.findall(r'label ="(\w+)"', (tmp_path / "g.dot").read_text())
        return sum(name not in ("Slice", "Reshape") for name in primitives)  # these are views

    assert kernels(30) == kernels(2) < 25


def test_budget_counts_steps_and_what_was_used() -> None:
    budget = Budget(steps=4)
    assert list(budget) == [0, 0.25, 0.5, 0.75]
    assert list(Budget(steps=4, used={"seconds": 1.0, "steps": 3})) == [0.75]
    assert budget.used()["steps"] == 4
    late = Budget(seconds=100, steps=1000, used={"seconds": 50.0, "steps": 100})
    assert late.progress() == pytest.approx(0.5, abs=0.01)
    assert list(Budget(seconds=1.0, used={"seconds": 2.0, "steps": 0})) == []
    with pytest.raises(ValueError, match="seconds or steps"):
        Budget()


def test_log_writes_scalars_and_stops_at_nan(tmp_path: Path) -> None:
    log = Log(tmp_path / "runs" / "log.jsonl", every=0.0)
    log.step(0.5, {"loss": mx.array(1.25), "_wave": mx.zeros((3,))}, rate=2.0)
    log.write(event="saved")
    with pytest.raises(DivergedError, match=r"loss is nan at 60\.0%"):
        log.step(0.6, {"good": mx.array(1.0), "loss": mx.array(float("nan"))})
    lines = [json.loads(line) for line in (tmp_path / "runs" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == 1.25
    assert lines[0]["rate"] == 2.0
    assert "_wave" not in lines[0]
    assert lines[1]["event"] == "saved"
    assert lines[2]["loss"] == "nan"


def test_every_waits() -> None:
    assert not Every(1000).due()
    now = Every(0.0)
    assert now.due()
    assert now.due()
