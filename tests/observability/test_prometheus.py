"""Metrics for Prometheus: served, in its format, as long as the run lasts."""

import math
import urllib.error
import urllib.request

import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.machine import free_port
from vla_rl.observability.prometheus import MetricsPage, exposition


def fetched(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10.0) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def test_the_newest_value_of_each_metric_is_served_until_the_end() -> None:
    port = free_port()
    with MetricsPage(port) as page:
        assert fetched(port) == "\n"
        page.on_iteration(1, {"eval/greedy_success": 0.25, "learner/update_kl": 0.5})
        page.on_iteration(2, {"learner/update_kl": 0.125})
        lines = fetched(port).splitlines()
        assert "vla_rl_iteration 2.0" in lines
        assert "vla_rl_eval_greedy_success 0.25" in lines
        assert lines[lines.index("# TYPE vla_rl_learner_update_kl gauge") + 1] == "vla_rl_learner_update_kl 0.125"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetched(port, "/")
        with pytest.raises(UserError, match=rf"log.prometheus_port={port}: .*in use.*; choose another port"):
            MetricsPage(port)
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetched(port)
    with MetricsPage(port):  # the port is free again
        assert fetched(port) == "\n"


def test_numbers_that_are_not_finite_have_their_names() -> None:
    text = exposition({"a/b-c": math.inf, "d": -math.inf, "e": math.nan})
    values = [line for line in text.splitlines() if line[0] != "#"]
    assert values == ["vla_rl_a_b_c +Inf", "vla_rl_d -Inf", "vla_rl_e NaN"]
