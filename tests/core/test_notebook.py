from html.parser import HTMLParser

import pytest
import torch

import torchremat as tr


def f(x):
    return torch.tanh(torch.tanh(torch.tanh(torch.tanh(x)))).sum()


X = torch.ones(64)
PLAN = tr.plan(f, X, budget="90%")
SHOWN = {
    "Plan": PLAN,
    "Report": tr.explain(f, X, policy="full"),
    "Diff": tr.explain(f, X).diff(tr.explain(f, X, policy="full")),
    "Estimate": tr.estimate(f, X),
    "Comparison": tr.compare(f, X, policies=["full"]),
    "Pareto": tr.planning.pareto(f, X, points=2),
    "TypedGraph": tr.make_graph(f)(X),
}


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert [name for name, _ in attrs if name != "style"] == []

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_the_text_under_a_title(name):
    reader = Reader()
    reader.feed(SHOWN[name]._repr_html_())
    assert reader.tags == ["div", "b", "pre"]  # nothing is loaded or run
    assert reader.texts[0] == name
    assert "".join(reader.texts[1:]) == str(SHOWN[name])


@pytest.mark.parametrize("name", [name for name in SHOWN if name != "TypedGraph"])
def test_a_repr_is_one_line(name):
    assert repr(SHOWN[name]).startswith(f"{name}(")
    assert "\n" not in repr(SHOWN[name])


def test_text_is_escaped():
    html = tr.explain(lambda x: x.sin().sin().sum(), X)._repr_html_()
    assert "<lambda>" not in html
    assert "&lt;lambda&gt;" in html
