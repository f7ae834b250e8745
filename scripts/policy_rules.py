"""Simple switching rules and the offline optimum, over all seeds of a setting at once.

They stand beside `decide` in the comparison and share nothing with it. A rule is a function of a setting to the layout
of every step [S, N] (indices into LAYOUTS); it sees estimates only.
"""

import numpy as np
from policy_settings import Setting


def optimum(setting: Setting) -> np.ndarray:
    """Total seconds of the best choice in hindsight per seed [S]: dynamic programming with the true costs."""
    best = setting.true[:, 0].copy()  # any layout may be the first
    for n in range(1, setting.true.shape[1]):
        best = (best[:, :, None] + setting.switch[:, n]).min(1) + setting.true[:, n]
    return best.min(1)


def total(setting: Setting, path: np.ndarray) -> np.ndarray:
    """Seconds of running the layouts `path` [S, N], switches included: [S]."""
    steps = np.take_along_axis(setting.true, path[..., None], 2)[..., 0].sum(1)
    seeds, at = np.indices(path[:, 1:].shape)
    return steps + setting.switch[seeds, at + 1, path[:, :-1], path[:, 1:]].sum(1)


def margin(setting: Setting, lead: float) -> np.ndarray:
    """Switch to the estimated best when it leads the present layout by `lead`."""
    seen = setting.seen
    rows = np.arange(len(seen))
    path = np.empty(seen.shape[:2], int)
    now = seen[:, 0].argmin(1)
    for n in range(seen.shape[1]):
        best = seen[:, n].argmin(1)
        now = np.where(seen[rows, n, best] < seen[rows, n, now] * (1 - lead), best, now)
        path[:, n] = now
    return path


def accumulated_regret(setting: Setting, *, old: float = 0.0, floor: float = 0.0) -> np.ndarray:
    """Switch to j once max(0, a_j + cost_now - cost_j), summed up since the last switch, is the directed switch cost.

    `old` is the weight of the past in an exponential mean of the logs of the estimates; `floor` a fraction of a step.
    """
    logs = np.log(setting.seen)
    rows = np.arange(len(logs))
    path = np.empty(logs.shape[:2], int)
    smooth = logs[:, 0].copy()
    now = smooth.argmin(1)
    regret = np.zeros_like(smooth)
    for n in range(logs.shape[1]):
        smooth = old * smooth + (1 - old) * logs[:, n]
        cost = np.exp(smooth)
        regret = np.maximum(0, regret + cost[rows, now][:, None] - cost)
        excess = regret - setting.switch[rows, n, now] - floor * setting.step_seconds
        excess[rows, now] = -1.0
        excess[regret <= 0] = -1.0
        best = excess.argmax(1)
        go = excess[rows, best] >= 0
        now = np.where(go, best, now)
        regret[go] = 0
        path[:, n] = now
    return path
