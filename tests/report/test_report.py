import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import torchremat as tr
from torchremat.core.source import Source
from torchremat.report.report import Report
from torchremat.report.report_rows import SAVED, Row, fold_rows


def row(name, decision="saved", *, op="mm", module="", nbytes=8, reason="dots", line=3):
    source = Source("/home/ann/model.py", line, "f")
    return Row(name, op, module, source, (2,), torch.float32, nbytes, decision, reason)


def layer_rows(numbers, name="fc.mm", **kwargs):
    found = []
    for i in numbers:
        module, _, op = f"layers.{i}.{name}".rpartition(".")
        found.append(row(f"{module}.{op}", module=module, **kwargs))
    return found


# --- totals ---------------------------------------------------------------------------------------


def example():
    return Report(
        (
            row("x", "input", op="", nbytes=100, reason="an argument"),
            row("w", "parameter", op="", nbytes=1000, reason="a parameter"),
            row("a.mm", module="a", nbytes=1),
            row("b.sin", "recomputed", op="sin", module="b", nbytes=20),
            row("b.exp", "offloaded", op="exp", module="b", nbytes=2),
            row("lift", "constant", op="lift_fresh_copy", nbytes=4),
            row("a.mm_1", module="a", nbytes=8),
        )
    )


def test_total_is_what_autograd_holds_of_its_own():
    report = example()
    assert SAVED == ("saved", "constant")
    assert (report.total, report.offloaded_total) == (1 + 4 + 8, 2)
    assert sum(report.by_module().values()) == report.total
    assert report.by_module() == {"a": 9, "": 4}
    assert report.by_decision() == {
        "saved": 9,
        "offloaded": 2,
        "constant": 4,
        "recomputed": 20,
        "input": 100,
        "parameter": 1000,
    }


def test_iterates_over_rows():
    report = example()
    assert list(report) == list(report.rows)
    assert len(report) == 7
    assert report == example()
    assert len(Report(())) == 0 and Report(()).total == 0


def test_a_row_has_an_aval():
    assert row("a").aval == "f32[2]"


# --- differences ----------------------------------------------------------------------------------


def test_diff_pairs_values_by_module_and_name():
    before = Report((row("a"), row("b"), row("b", "recomputed"), row("c", nbytes=5)))
    after = Report((row("b"), row("a", "recomputed"), row("b"), row("d")))
    diff = before.diff(after)
    assert [(c.row.name, c.before, c.after) for c in diff] == [
        ("a", "saved", "recomputed"),
        ("b", "recomputed", "saved"),
        ("c", "saved", None),
        ("d", None, "saved"),
    ]
    assert (diff.total_before, diff.total_after, len(diff)) == (21, 24, 4)
    assert str(diff).splitlines()[0] == "21 B saved -> 24 B (3 B more), 4 values decided otherwise"


def test_diff_takes_a_report():
    with pytest.raises(TypeError, match=r"diff takes another Report, but it was given 3 \(int\)"):
        example().diff(3)


def test_diff_of_equals_is_empty():
    diff = example().diff(example())
    assert len(diff) == 0
    assert str(diff) == "13 B saved -> 13 B (0 B more), 0 values decided otherwise"


def test_diff_folds_layers():
    before, after = layer_rows(range(12)), layer_rows(range(12), decision="recomputed")
    lines = str(Report(tuple(before)).diff(Report(tuple(after)))).splitlines()
    assert lines[1:] == ["  96 B  saved  ->  recomputed  x12  layers.0-11.fc.mm  f32[2]"]


# --- text -----------------------------------------------------------------------------------------


def test_identical_layers_are_fold_rows():
    report = Report((*layer_rows(range(12)), *layer_rows(range(11), "attn.mm", nbytes=2048)))
    assert str(report).splitlines() == [
        "saved for the backward pass: 22.1 KiB in 23 tensors",
        "",
        "saved: dots, 22.1 KiB",
        "      96 B  x12  layers.0-11.fc.mm    f32[2]  model.py:3 (f)",
        "  22.0 KiB  x11  layers.0-10.attn.mm  f32[2]  model.py:3 (f)",
    ]


def test_sections_tell_decision_and_reason():
    report = Report(
        (
            row("a", reason="no checkpoint decides: MmBackward0 reads it"),
            row("b", reason="no checkpoint decides: SinBackward0 reads it"),
            row("c", "recomputed", reason="dots does not let it be saved"),
            row("x", "input", op="", reason="an argument"),
        )
    )
    titles = [line for line in str(report).splitlines()[1:] if line and not line.startswith(" ")]
    assert titles == [
        "saved: no checkpoint decides, 16 B",
        "recomputed: dots does not let it be saved, 8 B",
        "inputs: an argument, 8 B",
    ]
    assert str(report).startswith(
        "saved for the backward pass: 16 B in 2 tensors; recomputed: 8 B in 1 tensor\n"
    )


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "layers.0.fc.mm"),
        ([0, 3, 6], "layers.0,3,6.fc.mm"),
        ([0, 1, 2, 10, 11], "layers.0-2,10-11.fc.mm"),
        ([5, 4], "layers.4-5.fc.mm"),
    ],
)
def test_folds_tell_which(numbers, text):
    (fold,) = fold_rows(layer_rows(numbers))
    assert fold.text == text
    assert fold.times == (f"x{len(numbers)}" if len(numbers) > 1 else "")
    assert len(fold.rows) == len(numbers)


def test_folds_of_two_numbers():
    names = ["a.0.b.0.mm", "a.0.b.1.mm", "a.1.b.0.mm", "a.1.b.1.mm"]
    assert [f.text for f in fold_rows([row(n) for n in names])] == ["a.0-1.b.0-1.mm"]
    assert [f.text for f in fold_rows([row(n) for n in names[:3]])] == [
        "a.0.b.0-1.mm",
        "a.1.b.0.mm",
    ]


def test_what_differs_in_more_is_not_fold_rows():
    rows = layer_rows([0, 1]) + layer_rows([2], nbytes=9) + layer_rows([3], line=4)
    assert [f.text for f in fold_rows(rows)] == [
        "layers.0-1.fc.mm",
        "layers.2.fc.mm",
        "layers.3.fc.mm",
    ]


def test_given_names_are_shown_with_their_module():
    rows = [row("attn", module=f"layers.{i}") for i in range(3)]
    assert [(f.text, f.times) for f in fold_rows(rows)] == [("layers.0-2.'attn'", "x3")]


def test_the_same_name_many_times_is_one_line():
    assert [(f.text, f.times) for f in fold_rows([row("attn")] * 3)] == [("attn", "x3")]


def test_text_fits_a_hundred_columns():
    long = "model.encoder.layers.0." + "attention." * 12 + "mm"
    source = Source("/home/" + "long_file_name" * 5 + ".py", 12345, "a_long_function_name" * 4)
    rows = tuple(
        Row(long, "mm", "", source, (1,) * 40, torch.float64, 10**15, "saved", "reason" * 50)
        for _ in range(2)
    )
    text = f"{Report(rows)}\n{Report(rows).diff(Report(()))}"
    assert max(map(len, text.splitlines())) <= 100
    assert "…" in text


# --- JSON -----------------------------------------------------------------------------------------


def test_json():
    text = example().to_json()
    assert text == example().to_json()
    content = json.loads(text)
    assert content["total"] == 13
    assert content["by_decision"]["recomputed"] == 20
    assert content["rows"][2] == {
        "name": "a.mm",
        "op": "mm",
        "module": "a",
        "source": "model.py:3 (f)",
        "shape": [2],
        "dtype": "f32",
        "nbytes": 1,
        "decision": "saved",
        "reason": "dots",
        "way": "graph",
    }


def test_json_of_an_explanation_does_not_depend_on_the_run():
    def text():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        return tr.explain(model, torch.ones(2, 4), policy="dots").to_json()

    assert text() == text()


def test_functions_are_left_out_before_names_are_cut():
    rows = layer_rows(range(2), name=f"{'a' * 50}.mm", nbytes=8)
    long = [replace(row, source=Source("/home/ann/model.py", 31, "b" * 40)) for row in rows]
    text = str(Report(tuple(long)))
    assert f"layers.0-1.{'a' * 50}.mm" in text
    assert text.splitlines()[-1].endswith("model.py:31")
    assert max(map(len, text.splitlines())) <= 100
