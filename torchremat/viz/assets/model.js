// A picture as a tree of modules with values as its leaves, of which closed modules hide some.

const FIELDS = ["name", "label", "op", "phase", "kind", "module", "source", "aval", "nbytes",
  "seconds", "reason", "reads", "group"];

// The values of a picture as objects. The page has rows, in which a text is its number in a list.
function valuesOf(picture) {
  const texts = new Set(["op", "phase", "kind", "module", "source", "aval", "reason", "label",
    "group"]);
  return picture.values.map((row, index) => {
    const value = { index };
    FIELDS.forEach((field, i) => {
      value[field] = texts.has(field) ? picture.texts[row[i]] : row[i];
    });
    return value;
  });
}

class Module {
  constructor(path, name, parent) {
    Object.assign(this, { path, name, parent, depth: parent ? parent.depth + 1 : 0 });
    this.modules = new Map();
    this.items = []; // modules and values, in program order
    this.links = []; // between items: [from, to, side], along which values flow
    this.open = false;
    this.sides = { forward: false, backward: false };
    this.totals = { forward: {}, backward: {} };
    this.count = 0;
    this.seconds = 0;
  }
}

// Whether a module only contains others, as a list of layers does, and operators outside it run
// between these. One box around all of them would then enclose a cycle.
function runsApart(module) {
  if (!module.parent || module.modules.size < 2) return false;
  if (module.items.some((item) => item.value && item.side === "forward")) return false;
  const reads = new Set(), read = new Set();
  for (const [from, to, side] of module.parent.links) {
    if (side !== "forward") continue;
    if (from === module) read.add(to);
    if (to === module) reads.add(from);
  }
  return [...reads].some((item) => read.has(item));
}

class Tree {
  // `shown(value)`: whether a value is drawn; readers of one that is not read its sources.
  constructor(values, shown) {
    this.values = values;
    this.loose = new Set(); // paths of modules that run apart: they are no boxes
    this._build(shown);
    for (const module of this.modules.values()) if (runsApart(module)) this.loose.add(module.path);
    if (this.loose.size) this._build(shown);
  }

  _build(shown) {
    this.root = new Module("", "", null);
    this.modules = new Map([["", this.root]]);
    this.leaves = this.values.map(() => null);
    for (const value of this.values) if (shown(value)) this._add(value);
    this.edges = this._edges();
    for (const edge of this.edges) this._link(edge);
  }

  _add(value) {
    const module = this._module(value.group);
    const leaf = { value, parent: module, side: value.phase, sides: { [value.phase]: true } };
    this.leaves[value.index] = leaf;
    module.items.push(leaf);
    for (let m = module; m; m = m.parent) {
      m.sides[value.phase] = true;
      m.totals[value.phase][value.kind] = (m.totals[value.phase][value.kind] ?? 0) + value.nbytes;
      m.count += 1;
      m.seconds += value.seconds ?? 0;
    }
  }

  _module(path) {
    let module = this.modules.get(path);
    if (!module) {
      const parent = this._module(path.slice(0, Math.max(0, path.lastIndexOf("."))));
      if (this.loose.has(path)) return parent;
      module = new Module(path, path.slice(parent.path.length + (parent.path ? 1 : 0)), parent);
      parent.modules.set(module.name, module);
      parent.items.push(module);
      this.modules.set(path, module);
    }
    return module;
  }

  // Pairs of leaves: each value with the drawn values that it reads, also through others.
  _edges() {
    const sources = new Map();
    const sourcesOf = (value) => {
      if (!sources.has(value.index)) {
        const found = new Set();
        sources.set(value.index, found);
        for (const read of value.reads)
          if (this.leaves[read]) found.add(read);
          else for (const source of sourcesOf(this.values[read])) found.add(source);
      }
      return sources.get(value.index);
    };
    const edges = [];
    for (const value of this.values)
      if (this.leaves[value.index])
        for (const source of sourcesOf(value))
          edges.push([this.leaves[source], this.leaves[value.index]]);
    return edges;
  }

  _link([from, to]) {
    if (from.side !== to.side) return;
    let [a, b] = [from, to];
    while ((a.parent?.depth ?? -1) > (b.parent?.depth ?? -1)) a = a.parent;
    while ((b.parent?.depth ?? -1) > (a.parent?.depth ?? -1)) b = b.parent;
    while (a.parent !== b.parent) [a, b] = [a.parent, b.parent];
    if (a !== b) a.parent.links.push([a, b, from.side]);
  }

  // The item that stands for a leaf: itself, or the outermost closed module around it.
  visible(leaf) {
    let found = leaf;
    for (let m = leaf.parent; m; m = m.parent) if (!m.open) found = m;
    return found;
  }

  // Opens modules from the outside in while at most `most` items are visible.
  openUpTo(most) {
    for (const module of this.modules.values()) module.open = false;
    this.root.open = true;
    let level = [...this.root.modules.values()], seen = this.root.items.length;
    while (level.length) {
      const more = level.reduce((sum, m) => sum + m.items.length - 1, 0);
      if (seen + more > most) break;
      for (const module of level) module.open = true;
      seen += more;
      level = level.flatMap((m) => [...m.modules.values()]);
    }
  }

  setAll(open) {
    for (const module of this.modules.values()) module.open = open || module === this.root;
  }

  reveal(leaf) {
    for (let m = leaf.parent; m; m = m.parent) m.open = true;
  }

  // The edges between visible items, each once, with the values that flow along it.
  visibleEdges() {
    const found = new Map(), numbers = new Map();
    const number = (item) => {
      if (!numbers.has(item)) numbers.set(item, numbers.size);
      return numbers.get(item);
    };
    const seen = this.leaves.map((leaf) => leaf && this.visible(leaf));
    for (const [from, to] of this.edges) {
      const a = seen[from.value.index], b = seen[to.value.index];
      if (a === b && from.side === to.side) continue;
      const key = `${number(a)} ${number(b)} ${from.side[0]}${to.side[0]}`;
      let edge = found.get(key);
      if (!edge) {
        edge = { from: a, to: b, sides: [from.side, to.side], values: new Set() };
        found.set(key, edge);
      }
      edge.values.add(from.value);
    }
    return [...found.values()];
  }
}
