"""support.dropout.Dropout, with torch.nn.Dropout as the referee."""

import math

import pytest
import torch

from support.dropout import Dropout

RATES = [0.01, 0.05, 0.1, 0.15, 0.2, 0.5]
FORMATS = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float64: 1e-12}  # relative rounding errors


def standard_error(rate, n):
    return math.sqrt(rate * (1 - rate) / n)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", [Dropout, torch.nn.Dropout])
def test_the_rate_is_exact_to_a_ten_thousandth(kind, rate):
    """Over 40 million elements, where the rate that is seen lies within 8e-5 (one standard error at 0.5)."""
    torch.manual_seed(0)
    layer, x, n = kind(rate), torch.ones(1000, 1003), 40 * 1000 * 1003
    dropped = sum((layer(x) == 0).sum().item() for _ in range(40)) / n
    assert abs(dropped - rate) < 1e-4 + 3 * standard_error(rate, n)


@pytest.mark.parametrize("rate", [*RATES, 0.999, 0.00001])
def test_the_expected_rate_is_exact_to_a_ten_thousandth(rate, monkeypatch):
    """Every one of the 65,536 values that an element's random number can have, once: so many are dropped."""
    everything = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.int64)
    monkeypatch.setattr(torch.Tensor, "random_", lambda bits, *_: bits.copy_(everything))
    dropped = (Dropout(rate)(torch.ones(65_536)) == 0).double().mean().item()
    assert abs(dropped - rate) < 1e-4 and dropped > 0


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rate", RATES)
def test_the_scale_keeps_the_mean(rate, dtype):
    torch.manual_seed(0)
    ours, theirs = (
        Dropout(rate)(torch.ones(301, 303, dtype=dtype)),
        torch.nn.Dropout(rate)(torch.ones(301, 303)),
    )
    assert ours.dtype == dtype and set(ours.unique().tolist()) == {0.0, ours.max().item()}
    assert ours.max().item() == pytest.approx(theirs.max().item(), rel=FORMATS[dtype] + 1e-4)
    assert ours.double().mean().item() == pytest.approx(
        1, abs=5 * standard_error(rate, 301 * 303) / (1 - rate) + 0.004
    )


@pytest.mark.parametrize("kind", [Dropout, torch.nn.Dropout])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_draws_are_independent(rate, kind):
    """Correlations between neighbours (within and across the 64 bits drawn at a time), between rows, and calls."""
    torch.manual_seed(0)
    first, second = (kind(rate)(torch.ones(512, 2048)) == 0 for _ in range(2))

    def correlation(a, b):  # in standard errors
        pairs = torch.stack([a.flatten(), b.flatten()]).double()
        return torch.corrcoef(pairs)[0, 1].item() * math.sqrt(a.numel())

    found = [correlation(first, second)] + [correlation(first[:-i], first[i:]) for i in (1, 2, 7)]
    steps = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64)
    found += [correlation(first[:, :-i], first[:, i:]) for i in steps]
    assert max(map(abs, found)) < 4.5
    rows = first.double().mean(dim=1)  # each row's own rate spreads as that of so many coins
    assert rows.std().item() == pytest.approx(standard_error(rate, 2048), rel=0.15)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", [Dropout, torch.nn.Dropout])
def test_the_gradient_is_the_mask(kind, dtype):
    torch.manual_seed(0)
    x = torch.randn(50, 70, dtype=dtype, requires_grad=True)
    y = kind(0.5)(x)
    y.sum().backward()
    assert torch.allclose(x.grad * x, y, rtol=FORMATS[dtype]) and 0.4 < (x.grad == 0).double().mean() < 0.6
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (3, 0), (2, 3, 5, 7), (1001,)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_any_shape(shape, dtype):
    y = Dropout(0.3)(torch.ones(shape, dtype=dtype))
    assert y.shape == shape and y.dtype == dtype


def test_a_view_that_is_not_contiguous():
    torch.manual_seed(0)
    x = torch.randn(40, 30).T
    y = Dropout(0.2)(x)
    assert torch.allclose(y[y != 0], x[y != 0] / 0.8, rtol=1e-4) and 0 < (y == 0).sum() < 600


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x = torch.randn(50, 60)
    assert torch.equal(Dropout(0.5).eval()(x), x) and torch.equal(Dropout(0.0)(x), x)
    assert (Dropout(0.001)(torch.ones(1000, 1000)) == 0).any()


def test_masks_follow_the_seed():
    layer, x = Dropout(0.5), torch.ones(1001)
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first) and not torch.equal(second, first)
    torch.manual_seed(4)
    assert not torch.equal(layer(x), first)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_a_rate_that_is_none(rate):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        Dropout(rate)
