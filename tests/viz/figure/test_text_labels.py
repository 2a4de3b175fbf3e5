import random

import pytest

from torchremat.viz.figure.figure import Mark, Text
from torchremat.viz.figure.text_labels import TextLabels, width_of
from torchremat.viz.pareto_figure import CURVE, HEIGHT, WIDTH, pareto_figure

MIB = 2**20
CURVE_POINTS = [(100 * MIB, 0.0), (80 * MIB, 2e-3), (60 * MIB, 5e-3), (40 * MIB, 3e-2)]


def box_of(text):
    width = width_of(text.text, text.size, bold=text.bold)
    left = text.x - {"start": 0, "middle": width / 2, "end": width}[text.anchor]
    return left, text.y - 0.8 * text.size, left + width, text.y + 0.25 * text.size


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("seed", range(8))
def test_names_stay_within_the_picture(seed):
    rng = random.Random(seed)
    named = {
        f"policy {i} {'of a long name ' * rng.randrange(4)}": (
            rng.uniform(40, 100) * MIB,
            rng.uniform(0, 3e-2),
        )
        for i in range(6)
    }
    named["at the right edge, of a name that is long"] = (100 * MIB, 0.0)
    figure = pareto_figure(CURVE_POINTS, named, "A title " * 30)
    texts = [shape for shape in figure.shapes if isinstance(shape, Text)]
    assert {t.text for t in texts} >= set(named)
    for left, top, right, bottom in map(box_of, texts):
        assert left >= 0 and top >= 0 and right <= WIDTH and bottom <= HEIGHT


def test_names_of_points_that_are_near_hide_neither_each_other_nor_a_mark():
    named = {"nothing saved": (99 * MIB, 0.0280), "per block": (97 * MIB, 0.0281)}
    named |= {"dots": (98 * MIB, 0.012), "aggressive recomputation": (99.5 * MIB, 0.0125)}
    figure = pareto_figure(CURVE_POINTS, named, "")
    names = [box_of(s) for s in figure.shapes if isinstance(s, Text) and s.text in named]
    marks = [s for s in figure.shapes if isinstance(s, Mark) and s.colour != CURVE]
    boxes = [(m.x - m.size, m.y - m.size, m.x + m.size, m.y + m.size) for m in marks]
    for i, name in enumerate(names):
        assert not any(overlap(name, other) for other in [*names[:i], *boxes])


def test_a_label_is_beside_its_mark_where_there_is_room():
    labels = TextLabels((0, 0, 200, 100))
    labels.take(50, 50, 5)
    assert labels.beside(50, 50, "full", 12, "#000").anchor == "start"
    assert labels.beside(190, 50, "full", 12, "#000").anchor == "end"
