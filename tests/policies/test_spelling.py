import re

import pytest
import torch

import torchremat as tr
from torchremat import checkpoint_policies as cp
from torchremat import policy
from torchremat.errors import BudgetSpellingError, PolicyError, PolicyValueError
from torchremat.policies.policy import as_policy
from torchremat.policies.spelling import list_spellings

_NAME_A = cp.save_only_these_names("a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", cp.everything_saveable),
        ("full", cp.nothing_saveable),
        ("dots", cp.dots_saveable),
        ("dots_with_no_batch_dims_saveable", cp.dots_with_no_batch_dims_saveable),
        ("names:attn,mlp", cp.save_only_these_names("attn", "mlp")),
        ("ops:aten.mm,aten.addmm", cp.save_ops("aten.mm", "aten.addmm")),
        ("modules:layers.*.attn", cp.save_modules("layers.*.attn")),
        ("recompute_ops:aten.sin", cp.recompute_ops("aten.sin")),
        ("recompute_modules:head", cp.recompute_modules("head")),
        ("save_any_names_but_these:a", cp.save_any_names_but_these("a")),
        ("save_anything_except_these_names:a,b", cp.save_anything_except_these_names("a", "b")),
        ("dots|names:attn", cp.dots_saveable | cp.save_only_these_names("attn")),
        ("~dots", ~cp.dots_saveable),
        ("dots&names:attn", cp.dots_saveable & cp.save_only_these_names("attn")),
        ("full|dots&~names:a", cp.nothing_saveable | cp.dots_saveable & ~_NAME_A),
        ("~(dots&names:a)|full", ~(cp.dots_saveable & _NAME_A) | cp.nothing_saveable),
        ("dots&(full|~names:a)", cp.dots_saveable & (cp.nothing_saveable | ~_NAME_A)),
        ("~(dots|names:a)", ~(cp.dots_saveable | _NAME_A)),
        ("budget:8GiB+offload", cp.memory_budget("8GiB", offload=True)),
        ("budget:time:+5%+offload", cp.memory_budget("time:+5%", offload=True)),
        ("saved:2MiB+offload", cp.memory_budget(saved="2MiB", offload=True)),
        ("full|full|none", cp.nothing_saveable | cp.nothing_saveable | cp.everything_saveable),
    ],
)
def test_spellings(text, expected):
    assert policy(text) == as_policy(text) == expected
    assert expected.spelling == str(expected) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("everything_saveable", cp.everything_saveable),
        ("nothing_saveable|dots_saveable", cp.nothing_saveable | cp.dots_saveable),
        ("checkpoint_dots", cp.dots_saveable),
        ("checkpoint_dots_with_no_batch_dims", cp.dots_with_no_batch_dims_saveable),
        ("save_only_these_names:attn,mlp", cp.save_only_these_names("attn", "mlp")),
        ("save_ops:aten.mm", cp.save_ops("aten.mm")),
        ("save_modules:head", cp.save_modules("head")),
        ("memory_budget:8GiB", cp.memory_budget("8GiB")),
    ],
)
def test_the_names_of_policies_are_spellings_too(text, expected):
    assert policy(text) == expected


def test_spaces_and_needless_parentheses_do_not_matter():
    assert policy(" ~ ( dots ) & ( ( names : a ) ) ") == ~cp.dots_saveable & _NAME_A
    assert policy("~~dots") == cp.dots_saveable
    spaced = " dots | names : attn , mlp "
    assert policy(spaced) == cp.dots_saveable | cp.save_only_these_names("attn", "mlp")


def test_overloads_are_spelled_by_name():
    assert policy("ops:aten::add.Tensor").spelling == "ops:aten.add.Tensor"


@pytest.mark.parametrize(
    "unspelled",
    [
        ~cp.save_only_these_names("a,b"),
        cp.dots_saveable & cp.save_only_these_names("a|b"),
        cp.save_only_these_names("a,b"),
        cp.save_only_these_names("a|b"),
        cp.save_only_these_names("a&b"),
        cp.save_only_these_names("a)"),
        cp.save_only_these_names(" a"),
        cp.save_only_these_names(),
        as_policy(lambda op, *avals, **params: True),
    ],
    ids=repr,
)
def test_what_has_no_spelling_is_printed_as_code(unspelled):
    assert unspelled.spelling is None
    assert str(unspelled) == repr(unspelled)


def test_each_spelling_that_errors_show_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tr.plan(torch.sin, torch.ones(2, requires_grad=True), budget=1.0).save("file.json")
    assert {str(policy(text)) for text in list_spellings()} == set(list_spellings())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "dot",
            r"policy\('dot'\): unknown policy 'dot', nearest: 'dots'.*Spellings are none, full",
        ),
        ("name:a", r"unknown policy 'name', nearest: 'names'"),
        ("Dots", r"nearest: 'dots'"),
        ("", r"a term is empty"),
        ("dots|", r"policy\('dots\|'\): a term is empty.*joined with \|"),
        (":a", r"a term is empty"),
        ("names", r"'names' takes a list, as in 'names:attn,mlp'"),
        ("names:", r"the list of 'names' has an empty item: write 'names:a,b'"),
        ("ops:aten.mm,,aten.bmm", r"has an empty item"),
        ("dots:aten.mm", r"'dots' takes no list: write 'dots' alone"),
        ("dots&", r"a term is empty"),
        ("(dots|full", r"a '\(' has no '\)'"),
        ("(dots)full", r"'full' follows a '\)' without \| or &"),
        ("dots)", r"unknown policy 'dots\)'"),
        ("50%", r"unknown policy '50%'; a budget of peak memory is written 'budget:50%'"),
        ("24 GiB", r"is written 'budget:24 GiB'"),
        ("0.5", r"is written 'budget:0.5'"),
        ("xyzzy", r"there are: 'budget', 'dots', 'dots_with_no_batch_dims_saveable' and \d+ more"),
    ],
)
def test_what_is_not_in_the_language(text, match):
    with pytest.raises(PolicyValueError, match=match) as info:
        policy(text)
    assert isinstance(info.value, ValueError)


def test_a_budget_stands_alone():
    with pytest.raises(PolicyError, match=r"decides on all values of a graph at once"):
        policy("dots|budget:0.5")


def test_unknown_ops_in_a_spelling():
    assert policy("ops:aten.mmm") == cp.save_ops("aten.mmm")  # which matches nothing: a warning


@pytest.mark.parametrize("given", [None, 3, cp.dots_saveable])
def test_only_strings_are_spellings(given):
    with pytest.raises(PolicyError, match=r"reads the spelling of a policy, a str.*was given a "):
        policy(given)


@pytest.mark.parametrize("limit", ["8GiB,4GiB", "", "8GiB+onload"])
@pytest.mark.parametrize("word", ["budget", "saved"])
def test_what_is_no_limit(word, limit):
    with pytest.raises(BudgetSpellingError, match=rf"'{re.escape(limit)}' is not a budget"):
        policy(f"{word}:{limit}+offload")
