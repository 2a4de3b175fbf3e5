// The page: one view of each picture, which fold, move and select together.

const byId = (id) => document.getElementById(id);

class App {
  constructor() {
    this.selected = null;
    this.colours = coloursOf();
    this.views = DATA.pictures.map((picture) => this._view(picture));
    this._sameHeight();
    if (this.views.length > 1) this._compare();
    this._controls();
    this.resize(true);
    window.addEventListener("resize", () => this.resize(false));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colours = coloursOf();
      this.draw();
    });
    this.updatePanel();
  }

  _view(picture) {
    picture.valueObjects = valuesOf(picture);
    const graph = element("canvas", { class: "graph", tabindex: "0",
      "aria-label": `graph of ${picture.title}` });
    const pane = element("div", { class: "pane" }, element("h1", {}, picture.title), graph);
    byId("panes").append(pane);
    const view = new GraphView(graph, picture.valueObjects, this);
    view.picture = picture;
    view.names = new Map(picture.valueObjects.map((value) => [value.name, value]));
    if (picture.timeline) {
      const canvas = element("canvas", { class: "timeline", "aria-label": "bytes alive" });
      pane.append(canvas);
      view.timeline = new TimelineView(canvas, picture, picture.valueObjects, this);
    }
    return view;
  }

  _compare() {
    const [a, b] = this.views;
    this.differences = [];
    for (const value of a.values) {
      const other = b.names.get(value.name);
      if (other?.kind !== value.kind) this.differences.push([value, other]);
    }
    for (const value of b.values) if (!a.names.has(value.name)) this.differences.push([null, value]);
    const names = new Set(this.differences.map(([x, y]) => (x ?? y).name));
    for (const view of this.views) view.differs = names;
  }

  _controls() {
    const search = byId("search"), hits = byId("hits");
    const close = () => hits.replaceChildren();
    search.addEventListener("input", () => {
      close();
      for (const value of this.search(search.value).slice(0, 12))
        hits.append(element("button", { onclick: () => { close(); this.show(value.name); } },
          element("b", {}, nameInModule(value)), ` ${value.name} ${value.aval} ${value.kind}`));
    });
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") hits.querySelector("button")?.click();
      if (event.key === "Escape") { close(); search.blur(); }
    });
    byId("open").addEventListener("click", () => this.setAll(true));
    byId("close").addEventListener("click", () => this.setAll(false));
    byId("fit").addEventListener("click", () => { this.views.forEach((v) => v.fit()); this.draw(); });
    byId("views").addEventListener("change", (event) => {
      for (const view of this.views) { view.rebuild(event.target.checked); view.relayout(); }
      this.draw();
    });
    const resident = byId("resident");
    resident.checked = DATA.pictures.every((picture) => picture.residentCounts);
    resident.disabled = resident.checked || !this.views.some((view) => view.timeline);
    resident.addEventListener("change", () => {
      for (const view of this.views) view.timeline?.setResident(resident.checked);
      this._sameHeight();
      this.draw();
    });
    document.addEventListener("keydown", (event) => this._key(event));
  }

  // All timelines have one scale, so that their heights can be compared.
  _sameHeight() {
    this.mostBytes = Math.max(0, ...this.views.map((view) => view.timeline?.most ?? 0));
  }

  _key(event) {
    if (event.target === byId("search") || event.ctrlKey || event.metaKey || event.altKey) return;
    const view = this.views[0];
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    const done = {
      "/": () => byId("search").focus(),
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8),
      f: () => byId("fit").click(), o: () => this.setAll(true), c: () => this.setAll(false),
      p: () => view.timeline && this.selectStep(view.timeline, view.timeline.peak),
      Escape: () => this.select(null),
    }[event.key];
    if (steps[event.key] && view.timeline?.step !== null && view.timeline) {
      const step = view.timeline.step + steps[event.key];
      this.selectStep(view.timeline, Math.min(view.timeline.length - 1, Math.max(0, step)));
    } else if (done) done();
    else return;
    event.preventDefault();
  }

  byName(view, name) {
    return view.names.get(name);
  }

  resize(fit) {
    for (const view of this.views) {
      view.resize();
      view.timeline?.resize();
      if (fit) view.fit();
    }
    this.draw();
  }

  draw() {
    for (const view of this.views) {
      view.draw();
      view.timeline?.draw();
    }
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  // --- events of the views ---

  moved(view) {
    for (const other of this.views)
      Object.assign(other, { x: view.x, y: view.y, scale: view.scale });
    this.later();
  }

  zoom(factor) {
    this.views[0].zoom(factor);
    this.moved(this.views[0]);
  }

  clicked(view, found) {
    if (found?.item.value) this.select(found.item.value.name);
    else if (found?.onHead) this.toggle(view, found.item, found.side);
    else this.select(null);
  }

  toggle(view, module, side) {
    view.toggle(module, side);
    for (const other of this.views) {
      const same = other.tree.modules.get(module.path);
      if (other === view || !same) continue;
      same.open = module.open;
      other.relayout();
    }
    this.moved(view);
    this.updatePanel();
  }

  setAll(open) {
    for (const view of this.views) {
      view.tree.setAll(open);
      view.relayout();
      view.fit();
    }
    this.draw();
    this.updatePanel();
  }

  hover(view, found, event) {
    if (!found?.item.value && !found?.onHead) return this._tip(null, event);
    const { item, side } = found;
    if (item.value) return this._tip([item.value.label, ...factsOf(item.value)], event);
    const totals = Object.entries(item.totals[side]).filter(([, nbytes]) => nbytes);
    this._tip([item.path, ["values", `${item.count}`],
      ...totals.map(([kind, nbytes]) => [kind, humanBytes(nbytes)]),
      ...(item.seconds ? [["seconds", humanSeconds(item.seconds)]] : [])], event);
  }

  hoverStep(timeline, event) {
    const { hovered } = timeline;
    this.later();
    if (hovered === null) return this._tip(null, event);
    const value = timeline.values[timeline.data.points[hovered]];
    this._tip([value ? nameInModule(value) : "?",
      ["step", `${hovered + 1} of ${timeline.length}`],
      ["alive", humanBytes(timeline.data.live[hovered])],
      ...CATEGORIES.filter((name) => timeline.stacks[name][hovered] >= 1)
        .map((name) => [name, humanBytes(timeline.stacks[name][hovered])])], event);
  }

  _tip(lines, event) {
    const tip = byId("tip");
    tip.hidden = !lines;
    if (!lines) return;
    const [title, ...rows] = lines;
    tip.replaceChildren(element("b", {}, title), element("table", {}, ...rows.map(([name, said]) =>
      element("tr", {}, element("th", {}, name), element("td", {}, said)))));
    const { width, height } = tip.getBoundingClientRect();
    const right = event.clientX + 16 + width < innerWidth;
    tip.style.left = `${right ? event.clientX + 16 : event.clientX - width - 16}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - height - 8))}px`;
  }

  // --- selecting ---

  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const found = this.views[0].values.filter((value) => {
      const all = `${value.name} ${value.label} ${value.op} ${value.module} ${value.kind} `
        + `${value.source}`;
      return words.every((word) => all.toLowerCase().includes(word));
    });
    const rank = (value) => (value.name === text ? 0 : value.label === text ? 1 : 2);
    return found.sort((a, b) => rank(a) - rank(b) || b.nbytes - a.nbytes);
  }

  select(name) {
    for (const view of this.views) {
      view.lit = null;
      const value = view.names.get(name);
      if (view.timeline) Object.assign(view.timeline, { step: null, mark: value ?? null });
    }
    this.selected = this.views.map((view) => view.names.get(name)).find(Boolean) ?? null;
    this.draw();
    this.updatePanel();
  }

  // Opens the modules that contain a value, and brings it into the middle.
  show(name) {
    for (const view of this.views) {
      const value = view.names.get(name);
      if (!value) continue;
      if (!view.tree.leaves[value.index]) {
        byId("views").checked = true;
        view.rebuild(true);
      }
      const leaf = view.tree.leaves[value.index];
      view.tree.reveal(leaf);
      view.relayout();
      view.centre(leaf, leaf.side);
    }
    this.select(name);
  }

  showModule(view, module) {
    for (const one of this.views) {
      const same = one.tree.modules.get(module.path);
      for (let m = same?.parent; m; m = m.parent) m.open = true;
      one.relayout();
      if (same) one.centre(same, same.sides.forward ? "forward" : "backward");
    }
    this.draw();
    this.updatePanel();
  }

  // Highlights the values in the graph that are alive at a step.
  selectStep(timeline, step) {
    this.selected = null;
    for (const view of this.views) {
      if (!view.timeline) continue;
      const mine = view.timeline === timeline;
      Object.assign(view.timeline, { step: mine ? step : null, mark: null });
      view.lit = mine ? new Map() : null;
      for (const [index, nbytes] of mine ? timeline.aliveAt(step) : [])
        view.lit.set(index, (view.lit.get(index) ?? 0) + nbytes);
    }
    this.draw();
    this.updatePanel();
  }

  updatePanel() {
    const view = this.views[0], stepped = this.views.find((v) => v.timeline?.step != null);
    const selected = this.selected
      && this.views.filter((v) => v.names.has(this.selected.name))
        .map((v) => selectionOf(this, v, v.names.get(this.selected.name)));
    byId("panel").replaceChildren(
      ...(selected ?? []),
      ...(stepped ? [stepOf(this, stepped, stepped.timeline.step)] : []),
      figuresOf(DATA.pictures),
      ...(this.differences ? [differencesOf(this, this.differences)] : []),
      modulesOf(this, view),
      reasonsOf(this, view),
      legendOf(DATA.pictures, DATA.kinds),
      section("Keys", element("p", { class: "quiet" }, "click a module to open or close it, drag to "
        + "move, wheel to zoom; / search, p peak, ← → steps, o open all, c close all, f fit, "
        + "+ − zoom, Esc select nothing")));
  }
}

function coloursOf() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["paper", "card", "ink", "quiet", "line", "outline", "edge", "accent", "differs"];
  const colours = Object.fromEntries(names.map((name) => [name, read(name)]));
  return { ...colours, accentFaint: read("accent-faint"), boxes: [read("box-a"), read("box-b")] };
}

window.torchremat = new App();
