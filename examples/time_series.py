"""Time series: causal attention forecasts the next value, and its weights lie on the lags of the season.

    python examples/time_series.py [--picture lags.svg]

The forecast is a weighted mean of earlier values, and the weights say which moments of the past looked like now:

    y'_t = Σ_{s < t} w_ts y_s,    w_t = softmax_s( f(h_t) · g(h_s) / √32 ),    h_t = (y_{t-8}, ..., y_{t-1})

The 8 values before t are the query, the 8 values before s the key, and y_s, which came next, the value; f and g are
small learned networks. It is the estimator of Nadaraya and Watson (1964) with a learned kernel. There are no positions:
a lag has weight because what came before looks alike.

The series are synthetic: a random season with mean 0 and variance 1, repeated every P steps, plus noise of standard
deviation 0.5, below which no forecast can come. There are two sets. In "one period", P = 8 in all series; in "eight
periods", P is 5 to 12, another in each series, and no model is told which. Trained on 6,400 series, tested on 300
others.

Printed for both sets: the root mean squared error of one-step forecasts from the 61st value on, beside
    last value             y_{t-1}
    seasonal naive         y_{t-P} with the true P
    seasonal mean          the mean of y_{t-P}, y_{t-2P}, ... with the true P: the best if P were known
    linear, all series     ridge regression on 48 lags, the same coefficients for all series
    linear, own            ridge regression on 24 lags, fitted again to the past of each series before each forecast
The last two choose their penalty on other series. Then the share of weight on lags that are multiples of the true P,
beside that of equal weights, and in how many series the lag with the most weight is one. A figure has a standard error
of about 0.005.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import regard

LENGTH, SCORED, HISTORY, DIM, NOISE = 120, 60, 8, 32, 0.5
SETS = {"one period": [8], "eight periods": [5, 6, 7, 8, 9, 10, 11, 12]}
LAGS = 40  # of the weights that are summed and drawn


def make_series(count: int, periods: list[int], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Series (count, 120) and the period of each, (count,)."""
    period = torch.tensor(periods)[torch.randint(len(periods), (count,), generator=draw)]
    inside = torch.arange(max(periods)) < period[:, None]
    season = torch.randn(inside.shape, generator=draw) * inside
    season = (season - season.sum(1, keepdim=True) / period[:, None]) * inside
    season = season / (season.square().sum(1, keepdim=True) / period[:, None]).sqrt()
    step = torch.arange(LENGTH) + torch.randint(max(periods), (count, 1), generator=draw)
    return season.gather(1, step % period[:, None]) + NOISE * torch.randn(count, LENGTH, generator=draw), period


class Forecaster(nn.Module):
    """Forecasts of the next value after each value of a series: (count, length) to (count, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(HISTORY, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.key = nn.Sequential(nn.Linear(HISTORY, 64), nn.ReLU(), nn.Linear(64, DIM))

    def heads(self, series: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of one head; query t has the values up to t, key s those before s, value s is y_s.

        So query t forecasts t + 1, and the causal mask, s ≤ t, lets it see all that is known then.
        """
        histories = nn.functional.pad(series, (HISTORY, 0)).unfold(1, HISTORY, 1)  # [count, length + 1, 8]
        return self.query(histories[:, 1:]), self.key(histories[:, :-1]), series[:, :, None]

    def forward(self, series: Tensor) -> Tensor:
        return regard.attention(*self.heads(series), mask=regard.masks.causal())[..., 0]

    def weights(self, series: Tensor) -> Tensor:
        """The weights of all forecasts, (count, length, length)."""
        weights = regard.lenses.Weights()
        return regard.observe(*self.heads(series), weights, mask=regard.masks.causal())[weights]


def train(model: Forecaster, periods: list[int], updates: int, draw: torch.Generator) -> None:
    """AdamW on the squared error of the forecasts of 32 new series in each update."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=updates)
    for _ in range(updates):
        series, _ = make_series(32, periods, draw)
        loss = (model(series)[:, HISTORY:-1] - series[:, HISTORY + 1 :]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def ridge(inputs: Tensor, wanted: Tensor, penalty: float) -> Tensor:
    """argmin_w |X w - y|² + penalty |w|²: X (..., n, lags) and y (..., n, 1) as w (..., lags, 1)."""
    normal = inputs.mT @ inputs + penalty * torch.eye(inputs.shape[-1])
    return torch.linalg.solve(normal, inputs.mT @ wanted)


def linear_of_all(others: Tensor, penalty: float) -> Callable[[Tensor], Tensor]:
    """A forecast by 48 lags with one set of coefficients, fitted to other series."""
    lags = 48
    coefficients = ridge(others.unfold(1, lags, 1)[:, :-1].flatten(0, 1), others[:, lags:].reshape(-1, 1), penalty)
    return lambda series: (series.unfold(1, lags, 1) @ coefficients)[:, SCORED - lags : -1, 0]


def linear_of_each(series: Tensor, penalty: float) -> Tensor:
    """A forecast by 24 lags with coefficients that are fitted to the values before it."""
    lags, forecasts = 24, []
    for step in range(SCORED, LENGTH):
        past = series[:, :step]
        coefficients = ridge(past.unfold(1, lags, 1)[:, :-1], past[:, lags:, None], penalty)
        forecasts.append((past[:, None, -lags:] @ coefficients)[:, 0])
    return torch.cat(forecasts, 1)


def seasonal(series: Tensor, period: Tensor, seasons: int) -> Tensor:
    """The mean of the values that are 1 to `seasons` periods back, as far as there are such."""
    back = torch.arange(SCORED, LENGTH)[:, None] - torch.arange(1, seasons + 1) * period[:, None, None]
    values = series[:, None].expand(-1, LENGTH - SCORED, -1).gather(2, back.clamp(min=0)) * (back >= 0)
    return values.sum(2) / (back >= 0).sum(2)


def error(forecasts: Tensor, series: Tensor) -> float:
    """The root mean squared error of forecasts from the 61st value on."""
    return float((forecasts - series[:, SCORED:]).square().mean().sqrt())


@torch.no_grad()
def measure(model: Forecaster, periods: list[int], draw: torch.Generator) -> tuple[dict[str, float], Tensor]:
    """Errors of all forecasts and figures of the weights; the mean weight of each lag in each period."""
    series, period = make_series(300, periods, draw)
    tuning, _ = make_series(100, periods, draw)
    others, _ = make_series(1000, periods, draw)
    of_all = [linear_of_all(others, penalty) for penalty in (1.0, 100.0, 1000.0)]
    own_penalty = min((10.0, 30.0, 100.0), key=lambda penalty: error(linear_of_each(tuning, penalty), tuning))
    figures = {
        "last value": error(series[:, SCORED - 1 : -1], series),
        "seasonal naive": error(seasonal(series, period, 1), series),
        "linear, all series": error(min(of_all, key=lambda one: error(one(tuning), tuning))(series), series),
        "linear, own": error(linear_of_each(series, own_penalty), series),
        "attention": error(model(series)[:, SCORED - 1 : -1], series),
        "seasonal mean": error(seasonal(series, period, LENGTH // min(periods)), series),
    }
    weights, forecast = model.weights(series), torch.arange(SCORED - 1, LENGTH - 1)  # query t forecasts t + 1
    lags = torch.arange(1, LAGS + 1)
    by_lag = torch.stack([weights[:, forecast, forecast + 1 - lag].mean(1) for lag in lags.tolist()], 1)
    multiple = lags % period[:, None] == 0
    figures["weight on multiples"] = float((by_lag * multiple).sum(1).mean() / by_lag.sum(1).mean())
    figures["equal weights"] = float(multiple.float().mean())
    figures["largest is a multiple"] = float(multiple.gather(1, by_lag.argmax(1, keepdim=True)).float().mean())
    return figures, torch.stack([by_lag[period == one].mean(0) for one in periods])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train on both sets, print the figures and return them."""
    parser = argparse.ArgumentParser(description="Forecasts by causal attention, and the season in its weights.")
    parser.add_argument("--updates", type=int, default=200, help="of each training, with 32 series in each")
    parser.add_argument("--picture", help="draw the weight of each lag for each period here: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    table, by_lag = {}, torch.empty(0)
    for name, periods in SETS.items():
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(0)
        model = Forecaster()
        train(model, periods, options.updates, draw)
        table[name], by_lag = measure(model, periods, draw)
    print(f"{'':24}" + "".join(f"{name:>16}" for name in SETS))
    for row in table["one period"]:
        print(f"{row:24}" + "".join(f"{table[name][row]:16.3f}" for name in SETS))
    if options.picture:
        rows = [f"P={period}" for period in SETS["eight periods"]]
        columns = [str(lag) for lag in range(1, LAGS + 1)]
        title = "Mean weight of the value so many steps back"
        regard.plots.save(regard.plots.heatmap(by_lag, rows, columns, title=title), options.picture)
    return {f"{row}, {name}": figure for name, figures in table.items() for row, figure in figures.items()}


if __name__ == "__main__":
    main()
