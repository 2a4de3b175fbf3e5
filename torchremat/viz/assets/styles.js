// The styles of the kinds of values. Hatches and outlines distinguish them without colours too.

const LOOKS = DATA.looks;

const HATCHES = {
  diagonal: (c) => { c.moveTo(0, 8); c.lineTo(8, 0); c.moveTo(-2, 2); c.lineTo(2, -2);
    c.moveTo(6, 10); c.lineTo(10, 6); },
  horizontal: (c) => { c.moveTo(0, 2); c.lineTo(8, 2); c.moveTo(0, 6); c.lineTo(8, 6); },
  vertical: (c) => { c.moveTo(2, 0); c.lineTo(2, 8); c.moveTo(6, 0); c.lineTo(6, 8); },
  dots: (c) => { c.rect(1, 1, 2, 2); c.rect(5, 5, 2, 2); },
};

const patterns = new Map();

// The fill of a kind: its colour with its hatch. The pattern is made once, for all boxes.
function fillOf(kind) {
  if (!patterns.has(kind)) {
    const { fill, hatch } = LOOKS[kind];
    if (hatch === "none") patterns.set(kind, fill);
    else {
      const tile = element("canvas", { width: 8, height: 8 });
      const c = tile.getContext("2d");
      c.fillStyle = fill;
      c.fillRect(0, 0, 8, 8);
      c.beginPath();
      HATCHES[hatch](c);
      c.strokeStyle = c.fillStyle = "rgba(0,0,0,.28)";
      c.lineWidth = 1.2;
      if (hatch === "dots") c.fill();
      else c.stroke();
      patterns.set(kind, c.createPattern(tile, "repeat"));
    }
  }
  return patterns.get(kind);
}

// Begins the outline of a kind's shape round the box x, y, w, h.
function outline(context, shape, x, y, w, h) {
  const d = Math.min(8, h / 3);
  context.beginPath();
  if (shape === "round") context.roundRect(x, y, w, h, h / 2);
  else if (shape === "box") context.roundRect(x, y, w, h, 3);
  else {
    const corners = {
      slanted: [[x + d, y], [x + w, y], [x + w - d, y + h], [x, y + h]],
      hexagon: [[x + d, y], [x + w - d, y], [x + w, y + h / 2], [x + w - d, y + h],
        [x + d, y + h], [x, y + h / 2]],
      cut: [[x, y], [x + w - d, y], [x + w, y + d], [x + w, y + h], [x + d, y + h],
        [x, y + h - d]],
    }[shape];
    corners.forEach(([a, b], i) => (i ? context.lineTo(a, b) : context.moveTo(a, b)));
    context.closePath();
  }
}

// A small picture of a kind, for the legend.
function swatch(kind) {
  const canvas = element("canvas", { width: 60, height: 36, class: "swatch" });
  const c = canvas.getContext("2d"), look = LOOKS[kind];
  c.scale(2, 2);
  outline(c, look.shape, 2, 2, 26, 14);
  c.fillStyle = fillOf(kind);
  c.fill();
  c.strokeStyle = "#52606d";
  c.setLineDash(look.border === "dashed" ? [3, 2] : []);
  c.lineWidth = look.border === "double" ? 2 : 1;
  c.stroke();
  return canvas;
}
