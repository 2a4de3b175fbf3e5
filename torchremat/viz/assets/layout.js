// The layout. The forward pass is a column that is read downwards, the backward pass a column beside
// it that is read upwards, so that a module and its derivative stand side by side. Within a module
// both share rows: an item stands below the items that it reads (above, in the backward pass).

const OP = { height: 34, least: 104, most: 250 };
const CLOSED = { width: 216, height: 58 };
const GAP = { x: 16, y: 26, gutter: 150 };
const PAD = { side: 14, top: 34, bottom: 16 };
const LANE = 12; // the width of an edge that passes a row
const LONGEST = 40; // rows that an edge passes in a lane of its own; longer ones go straight
const SIDES = ["forward", "backward"];

function sizeOfValue(value, mostBytes) {
  if (value.kind === "view" || !value.aval) return { w: 92, h: 20 };
  const share = Math.sqrt(value.nbytes / Math.max(mostBytes, 1));
  return { w: OP.least + (OP.most - OP.least) * share, h: OP.height };
}

// The row of each item of a module. Folding does not change it, so that items keep their order.
function rowsOf(module) {
  if (module.rows) return module.rows;
  if (!module.links.length && module.items.length > 2) {
    // the rows of a report have no reads: they stand in their order
    module.rows = new Map(module.items.map((item, i) => [item, i]));
    return module.rows;
  }
  const below = new Map(module.items.map((item) => [item, new Set()]));
  for (const [from, to, side] of module.links)
    if (side === "forward") below.get(from).add(to);
    else below.get(to).add(from);
  const order = topological(module.items, below);
  const rank = new Map(module.items.map((item) => [item, 0]));
  const place = new Map(order.map((item, i) => [item, i]));
  const onward = (item) => [...below.get(item)].filter((n) => place.get(n) > place.get(item));
  for (const item of order)
    for (const next of onward(item)) rank.set(next, Math.max(rank.get(next), rank.get(item) + 1));
  const isSource = new Set(module.items);
  for (const item of order) for (const next of onward(item)) isSource.delete(next);
  for (const item of [...order].reverse()) {
    const nexts = onward(item);
    if (isSource.has(item) && nexts.length)
      rank.set(item, Math.min(...nexts.map((n) => rank.get(n))) - 1);
  }
  module.rows = rank;
  return rank;
}

// The items in an order in which those below an item come after it. Edges that close a cycle are
// ignored. It has a stack of its own: recursion would overflow in a long chain of operators.
function topological(items, below) {
  const state = new Map(), order = [];
  for (const start of items) {
    if (state.has(start)) continue;
    const stack = [[start, below.get(start)[Symbol.iterator]()]];
    state.set(start, "open");
    while (stack.length) {
      const [item, rest] = stack[stack.length - 1];
      const { value: next, done } = rest.next();
      if (done) {
        state.set(item, "done");
        order.push(item);
        stack.pop();
      } else if (!state.has(next)) {
        state.set(next, "open");
        stack.push([next, below.get(next)[Symbol.iterator]()]);
      }
    }
  }
  return order.reverse();
}

// The entries of each row on one side: items, and lanes for the edges that pass.
function entriesOf(module, side, boxes) {
  const rank = rowsOf(module);
  const rows = [], entries = new Map(), links = [];
  const put = (entry) => {
    (rows[entry.row] ??= []).push(entry);
    return entry;
  };
  for (const item of module.items) {
    if (!item.sides[side]) continue;
    const { w, h } = boxes.get(item)[side];
    entries.set(item, put({ item, row: rank.get(item), w, h, near: [] }));
  }
  const lanes = new Map();
  for (const [from, to, linkSide] of module.links) {
    if (linkSide !== side) continue;
    const step = Math.sign(rank.get(to) - rank.get(from));
    let last = entries.get(from);
    if (Math.abs(rank.get(to) - rank.get(from)) <= LONGEST)
      for (let row = last.row + step; row !== rank.get(to) && step; row += step) {
        if (!lanes.has(from)) lanes.set(from, new Map());
        const known = lanes.get(from);
        if (!known.has(row)) {
          known.set(row, put({ lane: from, row, w: LANE, h: 0, near: [] }));
          links.push([last, known.get(row)]);
        }
        last = known.get(row);
      }
    links.push([last, entries.get(to)]);
  }
  for (const [a, b] of links) {
    if (a.row === b.row) continue;
    a.near.push(b);
    b.near.push(a);
  }
  for (let r = 0; r < rows.length; r++) rows[r] ??= [];
  return { rows, entries, lanes };
}

// Visits rows downwards or upwards. The wish of an entry is the mean place of its neighbours in the
// rows before, as in the barycentre method of Sugiyama's layered drawings.
function sweep(rows, down, measured, move) {
  for (const row of down ? rows : [...rows].reverse()) {
    for (const entry of row) {
      const near = entry.near.filter((n) => (down ? n.row < entry.row : n.row > entry.row));
      const total = near.reduce((s, n) => s + weightOf(entry, n), 0);
      const wished = near.reduce((s, n) => s + weightOf(entry, n) * measured(n), 0);
      entry.wish = total ? wished / total : null;
    }
    move(row);
  }
}

// Boxes weigh more than lanes, so that boxes stand straight below each other and edges bend.
const weightOf = (a, b) => (a.item ? 8 : 1) * (b.item ? 8 : 1);
const orderOf = (entry) => entry.order;
const centreOf = (entry) => entry.x + entry.w / 2;

function reorder(row) {
  for (const entry of row) entry.wish ??= entry.order;
  row.sort((a, b) => a.wish - b.wish || a.order - b.order);
  row.forEach((entry, i) => { entry.order = i - row.length / 2; });
}

// Moves the entries of a row towards their wishes, in their order and without overlap.
function shift(row) {
  let end = -Infinity, error = 0, count = 0;
  const places = row.map((entry) => {
    const wish = entry.wish === null ? entry.x : entry.wish - entry.w / 2;
    const x = Math.max(wish, end);
    end = x + entry.w + GAP.x;
    if (entry.wish !== null) {
      error += weightOf(entry, entry) * (wish - x);
      count += weightOf(entry, entry);
    }
    return x;
  });
  const back = count ? error / count : 0;
  row.forEach((entry, i) => { entry.x = places[i] + back; });
}

function placeSide(module, side, boxes) {
  const found = entriesOf(module, side, boxes);
  for (const row of found.rows)
    row.forEach((entry, i) => { entry.order = i - row.length / 2; });
  for (let i = 0; i < 6; i++) sweep(found.rows, i % 2 === 0, orderOf, reorder);
  for (const row of found.rows) {
    let x = -row.reduce((sum, e) => sum + e.w + GAP.x, -GAP.x) / 2;
    for (const entry of row) {
      entry.x = x;
      x += entry.w + GAP.x;
    }
  }
  for (let i = 0; i < 6; i++) sweep(found.rows, i % 2 === 0, centreOf, shift);
  let least = Infinity, most = -Infinity;
  for (const entry of found.rows.flat()) {
    least = Math.min(least, entry.x);
    most = Math.max(most, entry.x + entry.w);
  }
  for (const entry of found.rows.flat()) entry.x -= least;
  found.width = Math.max(0, most - least);
  return found;
}

// The boxes of a module on both sides, with those of its items in them.
function measure(module, mostBytes) {
  if (!module.open) {
    const box = { w: CLOSED.width, h: CLOSED.height };
    return { forward: { ...box }, backward: { ...box } };
  }
  const boxes = new Map();
  for (const item of module.items)
    if (item.value) boxes.set(item, { [item.side]: sizeOfValue(item.value, mostBytes) });
    else boxes.set(item, measure(item, mostBytes));
  const sides = Object.fromEntries(SIDES.map((side) => [side, placeSide(module, side, boxes)]));
  const num = Math.max(sides.forward.rows.length, sides.backward.rows.length);
  const tops = [], heights = [];
  let y = PAD.top;
  for (let r = 0; r < num; r++) {
    const all = SIDES.flatMap((side) => sides[side].rows[r] ?? []);
    heights[r] = all.reduce((most, e) => Math.max(most, e.h), 0);
    tops[r] = y;
    y += heights[r] + (all.some((e) => e.item) ? GAP.y : 0);
  }
  const height = y - GAP.y + PAD.bottom;
  const result = {};
  for (const side of SIDES) {
    for (const entry of sides[side].rows.flat()) {
      entry.x += PAD.side;
      entry.y = tops[entry.row] + (entry.item?.value ? (heights[entry.row] - entry.h) / 2 : 0);
      entry.height = heights[entry.row];
    }
    const title = 24 + 7.5 * titleOf(module).length;
    const w = Math.max(sides[side].width + 2 * PAD.side, title);
    const off = (w - 2 * PAD.side - sides[side].width) / 2;
    for (const entry of sides[side].rows.flat()) entry.x += off;
    result[side] = { w, h: height, ...sides[side], boxes };
  }
  return result;
}

// The title of a module: a number alone, such as `0`, gets its list's name, `layers.0`.
function titleOf(module) {
  if (!module.parent) return "";
  return /^\d+$/.test(module.name) && module.parent.parent
    ? `${module.parent.name}.${module.name}` : module.name;
}

// Boxes of all visible items: `boxes` from item to side to {x, y, w, h}, in the order in which they
// are drawn, and `lanes`, the ways of edges past rows.
function layout(tree, mostBytes) {
  const root = measure(tree.root, mostBytes);
  const scene = { boxes: new Map(), lanes: new Map(), columns: {} };
  let x = 0;
  for (const side of SIDES) {
    const has = tree.root.sides[side];
    scene.columns[side] = { x, w: root[side].w, h: root[side].h, shown: has };
    if (has) {
      put(tree.root, side, root[side], x, 0, scene);
      x += root[side].w + GAP.gutter;
    }
  }
  scene.w = Math.max(0, x - GAP.gutter);
  scene.h = root.forward.h;
  return scene;
}

function put(item, side, box, x, y, scene) {
  if (!scene.boxes.has(item)) scene.boxes.set(item, {});
  scene.boxes.get(item)[side] = { x, y, w: box.w, h: box.h };
  if (!box.rows) return;
  for (const [inner, entry] of box.entries)
    put(inner, side, entry.item.value ? { w: entry.w, h: entry.h } : box.boxes.get(inner)[side],
      x + entry.x, y + entry.y, scene);
  for (const [from, rows] of box.lanes) {
    const ways = new Map();
    for (const [row, e] of rows)
      ways.set(row, { x: x + e.x + e.w / 2, top: y + e.y, bottom: y + e.y + e.height });
    if (!scene.lanes.has(from)) scene.lanes.set(from, {});
    scene.lanes.get(from)[side] = ways;
  }
}
