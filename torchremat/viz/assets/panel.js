// The panel at the side: the selection, totals and the legend.

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

// Rows of a name, a bar and bytes; `row`: {text, nbytes, kind, click, note}.
function barTable(rows, most = Math.max(1, ...rows.map((row) => row.nbytes))) {
  const table = element("div", { class: "bars" });
  for (const row of rows) {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${Math.min(100, (100 * row.nbytes) / most)}%`;
    bar.style.background = LOOKS[row.kind ?? "saved"].fill;
    const line = element(row.click ? "button" : "div", { class: "row", title: row.note ?? row.text },
      element("span", { class: "name" }, row.text),
      element("span", { class: "number" }, humanBytes(row.nbytes)),
      element("span", { class: "track" }, bar));
    if (row.click) line.addEventListener("click", row.click);
    table.append(line);
  }
  return table;
}

function limited(rows, most) {
  const rest = rows.slice(most);
  if (!rest.length) return barTable(rows);
  const largest = Math.max(1, ...rows.slice(0, most).map((row) => row.nbytes));
  const nbytes = rest.reduce((total, row) => total + row.nbytes, 0);
  return barTable([...rows.slice(0, most), { text: `${rest.length} more`, nbytes, kind: "temporary" }],
    largest);
}

function figuresOf(pictures) {
  const table = element("table", { class: "figures" });
  const names = pictures[0].figures.map(([name]) => name);
  if (pictures.length > 1)
    table.append(element("tr", {}, element("th", {}, ""),
      ...pictures.map((p) => element("th", {}, p.title))));
  for (const [i, name] of names.entries())
    table.append(element("tr", {}, element("th", {}, name),
      ...pictures.map((p) => element("td", {}, p.figures.find(([n]) => n === name)?.[1] ?? "-"))));
  return section("The step", table);
}

function legendOf(pictures, kinds) {
  const list = element("ul", { class: "legend" });
  const seen = new Set(pictures.flatMap((p) => p.valueObjects.map((value) => value.kind)));
  for (const [kind, meaning] of Object.entries(kinds))
    if (seen.has(kind))
      list.append(element("li", { title: meaning }, swatch(kind), element("b", {}, kind),
        element("span", {}, meaning)));
  return section("What the boxes are", list);
}

// The facts on a value, as rows.
function factsOf(value) {
  return [["operator", value.op], ["module", value.module], ["shape", value.aval],
    ["bytes", value.nbytes ? `${humanBytes(value.nbytes)} (${value.nbytes})` : ""],
    ["seconds", value.seconds === null ? "" : humanSeconds(value.seconds)],
    ["line", value.source], ["decision", value.kind], ["reason", value.reason],
    ["node", `${value.name} (${value.phase})`]].filter(([, said]) => said);
}

function selectionOf(app, view, value) {
  const table = element("table", { class: "figures" });
  for (const [name, said] of factsOf(value))
    table.append(element("tr", {}, element("th", {}, name), element("td", {}, said)));
  const lifetimes = view.timeline?.lifetimesOf(value) ?? [];
  for (const [, nbytes, category, first, last] of lifetimes)
    table.append(element("tr", {}, element("th", {}, "alive"), element("td", {},
      `${humanBytes(nbytes)} ${CATEGORIES[category]}, steps ${first + 1} to ${last + 1}`)));
  return section(value.label, table);
}

function stepOf(app, view, step) {
  const { timeline } = view, value = view.values[timeline.data.points[step]];
  const phase = step < timeline.data.backward ? "forward" : "backward";
  const alive = timeline.aliveAt(step);
  const inside = timeline.data.live[step] - alive.reduce((total, [, nbytes]) => total + nbytes, 0);
  const rows = alive.map(([index, nbytes, category]) => {
    const one = view.values[index];
    return { text: nameInModule(one), nbytes, kind: category, note: `${category}: ${one.name}`,
      click: () => app.show(one.name) };
  });
  if (inside) rows.push({ text: "inside the operator", nbytes: inside, kind: "temporary" });
  return section(`${humanBytes(timeline.data.live[step])} alive at step ${step + 1}`,
    element("p", { class: "quiet" }, `${phase}, ${step + 1} of ${timeline.length}: `,
      element("button", { class: "link", onclick: () => app.show(value?.name) },
        value ? nameInModule(value) : "?")),
    limited(rows, 24));
}

const nameInModule = (value) => (value.module ? `${value.module}.${value.label}` : value.label);

// The bytes that each visible module saves.
function modulesOf(app, view) {
  const held = (totals) => (totals.saved ?? 0) + (totals.constant ?? 0);
  const onHost = (totals) => (totals.offloaded ? `${humanBytes(totals.offloaded)} on the host, ` : "");
  const rows = [];
  const visit = (module) => {
    let own = {};
    for (const item of module.items) {
      if (!item.value && item.open) visit(item);
      else if (!item.value) rows.push(rowFor(item, item.totals.forward));
      else if (item.side === "forward")
        own[item.value.kind] = (own[item.value.kind] ?? 0) + item.value.nbytes;
    }
    rows.push(rowFor(module, own));
  };
  const rowFor = (module, totals) => ({
    text: module.path || "outside any module", nbytes: held(totals) + (totals.offloaded ?? 0),
    note: `${humanBytes(held(totals))} saved, ${onHost(totals)}`
      + `${humanBytes(totals.recomputed ?? 0)} recomputed`,
    click: () => app.showModule(view, module) });
  visit(view.tree.root);
  const found = rows.filter((row) => row.nbytes).sort((a, b) => b.nbytes - a.nbytes);
  return section("Saved, by module", found.length ? limited(found, 14)
    : element("p", { class: "quiet" }, "nothing is saved"));
}

function reasonsOf(app, view) {
  const totals = new Map();
  for (const value of view.values) {
    if (!["saved", "offloaded", "recomputed", "constant"].includes(value.kind)) continue;
    if (!value.nbytes) continue;
    const key = `${value.kind}: ${value.reason || "no reason noted"}`;
    const row = totals.get(key) ?? { text: key, nbytes: 0, kind: value.kind };
    row.nbytes += value.nbytes;
    totals.set(key, row);
  }
  const rows = [...totals.values()].sort((a, b) => b.nbytes - a.nbytes);
  return rows.length ? section("By reason", limited(rows, 10)) : "";
}

// The values on which two pictures decide differently, the largest first.
function differencesOf(app, differences) {
  const rows = differences.map(([a, b]) => ({
    text: `${nameInModule(a ?? b)}: ${a?.kind ?? "-"} → ${b?.kind ?? "-"}`,
    nbytes: (a ?? b).nbytes, kind: b?.kind ?? "view", click: () => app.show((a ?? b).name) }));
  rows.sort((a, b) => b.nbytes - a.nbytes);
  return section(`${rows.length} values decided otherwise`, rows.length ? limited(rows, 30)
    : element("p", { class: "quiet" }, "nothing differs"));
}
