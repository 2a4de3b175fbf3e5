// A canvas with a graph on it: zooming, moving, finding the item under the pointer.

const FONT = "system-ui, 'Segoe UI', 'Liberation Sans', sans-serif";
const CROSSING = { saved: 0.75, offloaded: 0.75, recomputed: 0.45 };
const BARS = ["saved", "offloaded", "recomputed", "output", "gradient", "temporary"];

class GraphView {
  constructor(canvas, values, app) {
    Object.assign(this, { canvas, values, app, scale: 1, x: 0, y: 0 });
    this.context = canvas.getContext("2d");
    this.mostBytes = values.reduce((most, v) => Math.max(most, v.nbytes), 1);
    this.lit = null; // positions of values that stand out, or null
    this.differs = new Set();
    this.rebuild(false);
    this.tree.openUpTo(120);
    this.relayout();
    listen(this);
  }

  rebuild(withViews) {
    const before = this.tree;
    this.withViews = withViews;
    this.tree = new Tree(this.values, (value) => withViews || value.kind !== "view");
    for (const [path, module] of before?.modules ?? [])
      if (this.tree.modules.has(path)) this.tree.modules.get(path).open = module.open;
  }

  relayout() {
    this.scene = layout(this.tree, this.mostBytes);
    this.scene.edges = this.tree.visibleEdges().map((edge) => routed(edge, this.scene));
    this.paths = pathsOf(this.scene.edges);
    this.mostHeld = 1;
    for (const item of this.scene.boxes.keys())
      if (!item.value && !item.open)
        for (const side of SIDES) this.mostHeld = Math.max(this.mostHeld, sum(item.totals[side]));
  }

  resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    Object.assign(this, { width, height, ratio });
  }

  fit() {
    const w = Math.max(this.scene.w, 1), h = Math.max(this.scene.h, 1);
    if (!this.width) return;
    const wide = (this.width - 40) / w;
    this.scale = Math.min(1.1, wide, Math.max((this.height - 60) / h, Math.min(wide, 0.55)));
    this.x = (this.width - w * this.scale) / 2;
    this.y = Math.max(44, (this.height - h * this.scale) / 2);
  }

  // Brings a value's box into the middle, at a size at which it can be read.
  centre(item, side) {
    const box = this.scene.boxes.get(item)?.[side];
    if (!box) return;
    this.scale = Math.max(this.scale, 0.8);
    this.x = this.width / 2 - (box.x + box.w / 2) * this.scale;
    this.y = this.height / 2 - (box.y + Math.min(box.h, 80) / 2) * this.scale;
  }

  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const scale = Math.min(4, Math.max(0.02, this.scale * factor));
    this.x = px - ((px - this.x) * scale) / this.scale;
    this.y = py - ((py - this.y) * scale) / this.scale;
    this.scale = scale;
  }

  // Opens or closes a module, whose title stays under the pointer.
  toggle(module, side) {
    const before = this.scene.boxes.get(module)[side];
    module.open = !module.open;
    this.relayout();
    const after = this.scene.boxes.get(module)[side];
    this.x += (before.x - after.x) * this.scale;
    this.y += (before.y - after.y) * this.scale;
  }

  // The innermost thing at a place on the canvas: {item, side, box, onHead}.
  at(px, py) {
    const x = (px - this.x) / this.scale, y = (py - this.y) / this.scale;
    let found = null;
    const search = (module) => {
      for (const item of module.items) {
        const boxes = this.scene.boxes.get(item);
        for (const side of SIDES) {
          const box = boxes?.[side];
          if (!box || !item.sides[side] || !contains(box, x, y)) continue;
          found = { item, side, box, onHead: !item.value && (!item.open || y < box.y + 26) };
          if (!item.value && item.open) search(item);
        }
      }
    };
    search(this.tree.root);
    return found;
  }

  // Where a visible item is on the page, for tests and tooltips.
  where(item, side) {
    const box = this.scene.boxes.get(item)?.[side];
    if (!box) return null;
    const { left, top } = this.canvas.getBoundingClientRect();
    return { x: left + this.x + (box.x + box.w / 2) * this.scale,
      y: top + this.y + (box.y + Math.min(box.h / 2, 12)) * this.scale };
  }

  draw() {
    const c = this.context, colours = this.app.colours;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = colours.paper;
    c.fillRect(0, 0, this.width, this.height);
    c.translate(this.x, this.y);
    c.scale(this.scale, this.scale);
    this.window = { x: -this.x / this.scale, y: -this.y / this.scale,
      w: this.width / this.scale, h: this.height / this.scale };
    this._columns(c, colours);
    this._modules(this.tree.root, c, colours);
    this._edges(c, colours);
    for (const [item, sides] of this.scene.boxes)
      for (const side of SIDES)
        if (sides[side] && item.sides[side] && overlaps(sides[side], this.window))
          if (item.value) this._value(item, sides[side], c, colours);
          else if (!item.open) this._closed(item, side, sides[side], c, colours);
  }

  _columns(c, colours) {
    c.font = `600 ${Math.min(40, 13 / this.scale)}px ${FONT}`;
    c.fillStyle = colours.quiet;
    c.textAlign = "center";
    for (const side of SIDES) {
      const column = this.scene.columns[side];
      const text = side === "forward" ? "FORWARD ↓" : "BACKWARD ↑";
      if (column.shown) c.fillText(text, column.x + column.w / 2, -12 / this.scale);
    }
    c.textAlign = "left";
  }

  _modules(module, c, colours) {
    for (const item of module.items) {
      if (item.value || !item.open) continue;
      for (const side of SIDES) {
        const box = this.scene.boxes.get(item)[side];
        if (!item.sides[side] || !overlaps(box, this.window)) continue;
        c.beginPath();
        c.roundRect(box.x, box.y, box.w, box.h, 8);
        c.fillStyle = colours.boxes[item.depth % 2];
        c.fill();
        c.strokeStyle = colours.line;
        c.lineWidth = 1;
        c.setLineDash([]);
        c.stroke();
        this._text(c, `▾ ${titleOf(item)}`, box.x + 10, box.y + 18, box.w - 20, 13, colours.ink, 600);
      }
      this._modules(item, c, colours);
    }
  }

  _edges(c, colours) {
    const faint = this.lit || this.app.selected ? 0.35 : 1;
    c.setLineDash([]);
    c.globalAlpha = faint;
    c.strokeStyle = colours.edge;
    c.fillStyle = colours.edge;
    for (const { path, heads, width } of this.paths) {
      c.lineWidth = width;
      c.stroke(path);
      if (this.scale > 0.25) c.fill(heads);
    }
    for (const edge of this.scene.edges) {
      if (!edge.crossing || !overlaps(edge.bounds, this.window)) continue;
      const share = Math.sqrt(edge.nbytes / this.mostBytes);
      c.globalAlpha = CROSSING[edge.crossing] * (faint < 1 ? 0.3 : 1);
      c.strokeStyle = LOOKS[edge.crossing].fill;
      c.setLineDash(edge.crossing === "recomputed" ? [5, 4] : edge.crossing === "offloaded"
        ? [2, 3] : []);
      c.lineWidth = 1 + 5 * Math.min(1, share);
      c.stroke(edge.path);
    }
    c.globalAlpha = 1;
    c.setLineDash([]);
    const leaf = this.app.selected && this.tree.leaves[this.app.selected.index];
    const chosen = leaf && this.tree.visible(leaf);
    c.strokeStyle = c.fillStyle = colours.accent;
    c.lineWidth = 2;
    for (const edge of this.scene.edges)
      if (leaf && touches(edge, chosen, leaf.side)) {
        c.stroke(edge.path);
        c.fill(edge.head);
      }
  }

  _value(leaf, box, c, colours) {
    const { value } = leaf, look = LOOKS[isCall(value) ? "call" : value.kind];
    const { x, y, w, h } = box;
    c.globalAlpha = this.lit && !this.lit.has(value.index) ? 0.22 : 1;
    outline(c, look.shape, x, y, w, h);
    c.fillStyle = fillOf(isCall(value) ? "call" : value.kind);
    c.fill();
    if (this.scale > 0.12) {
      c.setLineDash(look.border === "dashed" ? [4, 3] : []);
      c.lineWidth = look.border === "double" ? 2 : 1;
      c.strokeStyle = colours.outline;
      c.stroke();
      c.setLineDash([]);
    }
    this._ring(c, colours, this.app.selected === value, this.differs.has(value.name), box);
    if (this.scale * h > (h < 30 ? 9 : 13)) {
      const bytes = value.nbytes ? humanBytes(value.nbytes) : "";
      if (h < 30) {
        this._text(c, value.label, x + 10, y + h / 2 + 4, w - 20, 11, look.ink, 400);
      } else {
        plate(c, look, x, y, w, h);
        c.font = `400 10px ${FONT}`;
        const taken = bytes ? c.measureText(bytes).width : 0;
        this._text(c, bytes, x + w - 9 - taken, y + 14, taken + 1, 10, look.ink, 400);
        this._text(c, value.label, x + 9, y + 14, w - 22 - taken, 11, look.ink, 600);
        this._text(c, value.aval, x + 9, y + 27, w - 18, 10, look.ink, 400);
      }
    }
    c.globalAlpha = 1;
  }

  _closed(module, side, box, c, colours) {
    const { x, y, w, h } = box, totals = module.totals[side];
    const live = this.lit && this._liveIn(module, side);
    c.globalAlpha = this.lit && !live ? 0.22 : 1;
    c.beginPath();
    c.roundRect(x, y, w, h, 8);
    c.fillStyle = colours.card;
    c.fill();
    c.strokeStyle = colours.outline;
    c.lineWidth = 1.2;
    c.stroke();
    this._ring(c, colours, false, this._differsIn(module, side), box);
    let at = x + 10;
    const unit = (w - 20) / this.mostHeld;
    for (const kind of BARS) {
      const width = (totals[kind] ?? 0) * unit;
      if (width < 0.4) continue;
      c.fillStyle = fillOf(kind);
      c.fillRect(at, y + 25, width, 10);
      c.strokeStyle = colours.outline;
      c.lineWidth = 0.5;
      c.strokeRect(at, y + 25, width, 10);
      at += width;
    }
    if (this.scale > 0.3) {
      const said = live ? `${humanBytes(live)} alive here` : summaryOf(totals, side);
      this._text(c, `▸ ${titleOf(module)}`, x + 10, y + 17, w - 60, 13, colours.ink, 600);
      c.textAlign = "right";
      this._text(c, `${module.count}`, x + w - 10, y + 17, 40, 10, colours.quiet, 400);
      c.textAlign = "left";
      this._text(c, said, x + 10, y + 50, w - 20, 11, live ? colours.accent : colours.quiet, 400);
    }
    c.globalAlpha = 1;
  }

  _ring(c, colours, isSelected, differs, { x, y, w, h }) {
    if (!isSelected && !differs) return;
    c.beginPath();
    c.roundRect(x - 4, y - 4, w + 8, h + 8, 7);
    c.setLineDash(isSelected ? [] : [7, 4]);
    c.lineWidth = 3;
    c.strokeStyle = isSelected ? colours.accent : colours.differs;
    c.stroke();
    c.setLineDash([]);
  }

  _liveIn(module, side) {
    let total = 0;
    for (const [index, nbytes] of this.lit) {
      const leaf = this.tree.leaves[index];
      if (leaf?.side !== side) continue;
      for (let m = leaf.parent; m; m = m.parent) if (m === module) total += nbytes;
    }
    return total;
  }

  _differsIn(module, side) {
    for (const name of this.differs) {
      const value = this.app.byName(this, name);
      const leaf = value && this.tree.leaves[value.index];
      if (leaf?.side !== side) continue;
      for (let m = leaf.parent; m; m = m.parent) if (m === module) return true;
    }
    return false;
  }

  _text(c, text, x, y, width, size, colour, weight) {
    c.font = `${weight} ${size}px ${FONT}`;
    c.fillStyle = colour;
    c.fillText(clipped(c, text, width), x, y);
  }
}

// A plain ground under the text of a hatched box.
function plate(c, look, x, y, w, h) {
  if (look.hatch === "none") return;
  c.fillStyle = look.fill;
  c.fillRect(x + 7, y + 4, w - 14, h - 7);
}

const sum = (totals) => Object.values(totals).reduce((a, b) => a + b, 0);
const contains = (box, x, y) => x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h;
const overlaps = (a, b) =>
  a.x < b.x + b.w && a.x + a.w > b.x && a.y < b.y + b.h && a.y + a.h > b.y;
const isCall = (value) => value.op && !value.aval && value.kind !== "view";

function touches(edge, item, side) {
  return (edge.from === item && edge.sides[0] === side) || (edge.to === item && edge.sides[1] === side);
}

function summaryOf(totals, side) {
  const named = side === "forward"
    ? [["saved", "saved"], ["offloaded", "on the host"], ["recomputed", "again"]]
    : [["gradient", "gradients"], ["temporary", "temporary"]];
  const said = named.filter(([kind]) => totals[kind])
    .map(([kind, text]) => `${humanBytes(totals[kind])} ${text}`);
  if (said.length) return said.join(" · ");
  return totals.temporary ? `${humanBytes(totals.temporary)} temporary` : "nothing saved";
}
