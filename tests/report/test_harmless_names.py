"""Names that would clear the screen, begin a line or turn the direction of writing are escaped."""

import json
import logging

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat import viz
from torchremat.errors import TorchrematError, UnmatchedWarning

EVIL = "\x1b[2Jbad\nname\r\x07\u202e\u009b31m\u2028<b>"


class Layer(nn.Linear):
    def forward(self, x):
        return tr.checkpoint_name(super().forward(x).tanh(), EVIL)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({EVIL: Layer(8, 8)})
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.layers[EVIL](x))


@pytest.fixture
def x():
    return torch.ones(4, 8)


def function_in(file):
    """A function of a file of this name, which needs the value of its argument."""
    scope = {}
    code = "def decide(x):\n    return x.sin().cos() if x.sum() > 0 else x"
    exec(compile(code, file, "exec"), scope)
    return scope["decide"]


def assert_harmless(text, name="bad"):
    assert name in text
    assert {c for c in text if not c.isprintable()} <= {"\n"}
    assert f"[2J{name}\n" not in text


NAMED = tr.checkpoint_policies.save_only_these_names(EVIL)


@pytest.mark.parametrize("policy", ["full", NAMED], ids=["full", "named"])
def test_an_explanation(policy, x):
    assert_harmless(str(tr.explain(Model(), x, policy=policy)))


def test_a_comparison(x):
    assert_harmless(str(tr.compare(Model(), x, policies=["full", NAMED])), "name")


def test_a_report_of_a_step_and_its_form_in_a_notebook(x):
    model = tr.nn.wrap(Model())
    model(x).sum().backward()
    assert_harmless(str(tr.nn.report(model)))
    assert_harmless(tr.nn.report(model)._repr_html_())


def test_residuals_and_their_log(x, caplog, monkeypatch, capsys):
    monkeypatch.setattr(tr.config, "log_checkpoint_residuals", True)
    model = tr.nn.wrap(Model(), NAMED)
    with caplog.at_level(logging.DEBUG, "torchremat"):
        model(x).sum().backward()
    assert_harmless(caplog.text)
    tr.print_saved_residuals(Model(), x)
    assert_harmless(capsys.readouterr().out)


def test_the_line_of_a_message(x):
    with pytest.raises(TorchrematError) as caught:
        tr.make_graph(function_in(f"/tmp/{EVIL}.py"))(x)
    assert_harmless(str(caught.value))


def test_a_warning(x):
    with pytest.warns(UnmatchedWarning) as caught:
        tr.explain(Model(), x, policy=tr.checkpoint_policies.save_only_these_names("\x1b[2J"))
    assert_harmless(str(caught[0].message))


def test_a_refused_selection():
    with pytest.raises(TorchrematError) as caught:
        tr.nn.wrap(Model(), select="nothing.*")
    assert_harmless(str(caught.value))


def test_a_plan_that_is_too_small(x):
    with pytest.raises(TorchrematError) as caught:
        tr.plan(Model(), x, budget=10)
    assert {c for c in str(caught.value) if not c.isprintable()} <= {"\n"}


def test_pages_and_pictures(x, tmp_path):
    plan = tr.plan(Model(), x, budget="2MiB")
    viz.graph_html(plan, tmp_path / "graph.html")
    viz.diff_html(plan, plan, tmp_path / "diff.html")
    viz.timeline(plan, tmp_path / "timeline.svg")
    viz.timeline(plan, tmp_path / "timeline.html")
    (tmp_path / "graph.dot").write_text(viz.to_dot(plan, title=EVIL), encoding="utf-8")
    for path in tmp_path.iterdir():
        assert_harmless(path.read_text(encoding="utf-8"))


def test_files_of_plans_keep_names_as_escapes_of_json(x, tmp_path):
    plan = tr.plan(Model(), x, budget="2MiB")
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert {c for c in text if not c.isprintable()} <= {"\n"}
    assert json.loads(text)
    content = json.loads(text) | {"peak_bytes": EVIL, EVIL: 1, "decisions": {EVIL: EVIL}}
    (tmp_path / "bad.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TorchrematError) as caught:
        tr.planning.Plan.load(tmp_path / "bad.json")
    assert {c for c in str(caught.value) if not c.isprintable()} <= {"\n"}
