import pytest
import torch
from torch import nn

from torchremat.errors import NoMatchError, SelectionWarning
from torchremat.nn import select_modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))

    def forward(self, x):
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self, num_layers=6):
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x)


def names(select, model=None):
    return [name for name, _ in select_modules(Model() if model is None else model, select)]


def layers(*numbers):
    return [f"layers.{i}" for i in numbers]


PATTERNS = [
    ("layers.*", layers(*range(6))),
    ("layers.0", layers(0)),
    ("layers.[024]", layers(0, 2, 4)),
    ("layers.?", layers(*range(6))),
    ("layers.*.attn", [f"layers.{i}.attn" for i in range(6)]),
    ("**.attn", [f"layers.{i}.attn" for i in range(6)]),
    ("*.attn", [f"layers.{i}.attn" for i in range(6)]),
    ("*.0.attn", ["layers.0.attn"]),
    (
        "layers.0.**",
        ["layers.0", "layers.0.attn", "layers.0.mlp", *(f"layers.0.mlp.{i}" for i in range(3))],
    ),
    ("layers.**.1", ["layers.1", *(f"layers.{i}.mlp.1" for i in range(6))]),
    ("**.embed", ["embed"]),
    ("*", ["embed"]),  # layers and heads are containers, which nothing calls
    ("heads.*", ["heads.a", "heads.b"]),
    ("layers.*,!layers.0", layers(1, 2, 3, 4, 5)),
    ("!layers.0 , layers.*", layers(1, 2, 3, 4, 5)),
    ("embed,layers.1", ["embed", "layers.1"]),
    ("layers.1,embed", ["embed", "layers.1"]),
    ("every:1", layers(*range(6))),
    ("every:2", layers(0, 2, 4)),
    ("every:4", layers(0, 4)),
    ("every:6", layers(0)),
    ("first:2", layers(0, 1)),
    ("last:2", layers(4, 5)),
    ("last:6", layers(*range(6))),
    ("range:2-4", layers(2, 3, 4)),
    ("range:5-5", layers(5)),
    ("first:1,last:1", layers(0, 5)),
    ("first:4,!range:2-3", layers(0, 1)),
    ("first:4,!layers.0", layers(1, 2, 3)),
    ("first: 2", layers(0, 1)),
    ("first:2,embed,!every:6", ["embed", "layers.1"]),
]


@pytest.mark.parametrize(("select", "expected"), PATTERNS)
def test_text(select, expected):
    assert sorted(names(select)) == sorted(expected)


def test_found_in_model_order():
    assert names("last:1,first:1,embed") == ["embed", "layers.0", "layers.5"]


def test_none_is_the_module_itself():
    model = Model()
    assert select_modules(model, None) == [("", model)]


def test_classes():
    assert names(Block) == layers(*range(6))
    assert names((Block, nn.Linear)) == ["embed", *layers(*range(6)), "heads.a", "heads.b"]


def test_predicates():
    assert names(lambda module: isinstance(module, nn.GELU)) == [
        f"layers.{i}.mlp.1" for i in range(6)
    ]
    assert names(lambda name, module: name.endswith("0") and isinstance(module, Block)) == layers(0)
    assert names(lambda module, limit=8: sum(1 for _ in module.parameters()) > 4) == layers(
        *range(6)
    )


def test_of_classes_and_predicates_the_outermost_matches():
    nested = nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU())), nn.ReLU())
    assert names(nn.Sequential, nested) == ["0"]
    assert names(lambda module: True, nested) == ["0", "1"]
    assert names("**", nested) == ["0", "0.0", "0.0.0", "1"]


def test_a_shared_module_is_found_once_and_by_each_name():
    model = Model(3)
    model.layers[2] = model.layers[0]
    assert names("layers.*", model) == layers(0, 1)
    assert names("layers.2", model) == layers(0)
    assert names("last:1", model) == layers(0)
    assert names("layers.*,!layers.2", model) == layers(1)
    assert names(Block, model) == layers(0, 1)


def test_positions_count_over_the_longest_list():
    model = Model(2)
    model.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert names("last:1", model) == ["more.2"]
    model.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert names("last:1", model) == layers(1)


def test_positions_count_over_a_sequential_if_there_is_no_list():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU())
    assert names("every:2", model) == ["0", "2"]
    assert names("first:1", nn.ModuleList([nn.ReLU()])) == ["0"]


def test_positions_count_over_a_dict_of_numbers():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(4, 8)})
    model.parts = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abcdef"})
    model.ends = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    assert names("every:2", model) == ["layers.4", "layers.6"]
    del model.layers
    assert names("every:4", model) == ["ends.0", "ends.4"]


def test_an_instance_may_have_its_own_forward():
    model = Model()
    model.layers.forward = lambda x: x
    assert names("layers", model) == ["layers"]


NO_MATCH = [
    ("layer.*", r"'layer\.\*' matches nothing\. Of the modules of Model, nearest: 'layers\.\d'"),
    ("layers.*,!layer.0", r"'layer\.0' matches nothing.*nearest: 'layers\.0'"),
    ("zzz", r"Of the modules of Model, there are: 'embed', 'heads\.a', 'heads\.b' and 36 more"),
    ("layers", r"layers is a ModuleList, which has no forward; what it holds is 'layers\.\*'"),
    ("layers.0,!layers.*", "'layers.0,!layers.*' excludes all that it selects".replace("*", r"\*")),
    (nn.Conv2d, "Model has no Conv2d in it. Of the classes in it, "),
    ((nn.Conv1d, nn.Conv2d), "Model has no Conv1d or Conv2d in it"),
    (Model, "The Model is one itself: leave out select to mean it"),
    (lambda module: False, "the predicate is true of no module in Model"),
]


@pytest.mark.parametrize(("select", "message"), NO_MATCH)
def test_nothing_matches(select, message):
    with pytest.raises(NoMatchError, match=message):
        names(select)


def test_nothing_to_count_over():
    with pytest.raises(NoMatchError, match="ModuleDict of numbers or Sequential, and Linear has"):
        names("first:1", nn.Linear(2, 2))
    nested = nn.ModuleList([nn.ModuleList(), nn.ModuleList()])
    with pytest.raises(NoMatchError, match="finds in the ModuleList only modules that have no for"):
        names("first:2", nested)


VALUES = [
    ("", "select='' has an empty term. Join patterns"),
    ("layers.*,", "has an empty term"),
    ("layers.*,!", "has an empty term"),
    ("!layers.0", "only excludes. Say first what to select: 'layers.*,!layers.0'"),
    ("evry:3", "'evry:3': there is no 'evry' to select by, nearest: 'every'"),
    ("every:", "'every:' cannot be read; it is spelled like 'every:3'"),
    ("every:two", "cannot be read"),
    ("every:-1", "cannot be read"),
    ("first:1.5", "cannot be read"),
    ("range:4", "'range:4' cannot be read; it is spelled like 'range:4-8'"),
    ("range:8-4", "'range:8-4' ends before it starts: write range:4-8"),
    ("every:0", "'every:0' is out of range: layers holds 6 modules, so it must be at least 1 and"),
    ("every:7", "at most 6"),
    ("first:0", "at least 1"),
    ("first:7", "at most 6"),
    ("last:7", "at most 6"),
    ("range:4-8", "'range:4-8' is out of range: layers holds 6 modules, so it must be within 0-5"),
    ("layers.*,!range:6-6", "within 0-5"),
]


@pytest.mark.parametrize(("select", "message"), VALUES)
def test_text_that_is_no_selection(select, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")) as caught:
        names(select)
    assert not isinstance(caught.value, NoMatchError)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (3, r"select must be a pattern such as 'layers\.\*', .* but it is 3 \(int\)"),
        (["layers.0", "layers.1"], r"\(list\); join patterns with ','"),
        ((), r"it is \(\) \(tuple\)"),
        (("layers.0",), "join patterns"),
        (nn.ReLU(), r"it is ReLU\(\) \(ReLU\)"),
    ],
)
def test_what_is_no_selection(select, message):
    with pytest.raises(TypeError, match=message):
        names(select)


def test_none_of_a_container():
    with pytest.raises(ValueError, match=r"a ModuleList has no forward of its own.*select='\*'"):
        select_modules(nn.ModuleList(), None)


def test_errors_of_a_predicate_reach_the_user():
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        names(lambda module: module.missing)


def test_a_predicate_may_answer_with_a_tensor():
    assert names(lambda m: torch.tensor(isinstance(m, Block))) == layers(*range(6))


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("every:2 & layers.*.attn", ["layers.0.attn", "layers.2.attn"]),
        ("layers.*.attn&every:2", ["layers.0.attn", "layers.2.attn"]),
        ("first:2 & last:2", ["layers.1"]),
        ("first:1 & **.attn, last:1", ["layers.0.attn", "layers.2"]),
        ("**.attn, !first:2 & **.attn", ["layers.2.attn"]),
    ],
)
def test_and_selects_what_lies_in_both(select, expected):
    assert [name for name, _ in select_modules(Model(3), select)] == expected


def test_and_that_selects_nothing():
    with pytest.raises(NoMatchError, match="none of one is, or lies in, one of the other"):
        select_modules(Model(3), "first:1 & layers.2.attn")
    with pytest.raises(ValueError, match="has an empty term"):
        select_modules(Model(3), "every:2 &")


def test_a_comma_between_position_and_pattern_inside_it_is_warned_of():
    with pytest.warns(SelectionWarning, match=r"write 'every:2 & layers\.\*\.attn'"):
        assert len(select_modules(Model(3), "layers.*.attn, every:2")) == 5
    assert len(select_modules(Model(3), "layers.1.attn, every:2")) == 3  # side by side
