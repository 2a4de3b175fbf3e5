// The ways of edges: through lanes in the module that contains both ends, so that they cross no box.

function routed(edge, scene) {
  const [sideA, sideB] = edge.sides;
  const a = scene.boxes.get(edge.from)[sideA], b = scene.boxes.get(edge.to)[sideB];
  const path = new Path2D();
  let points;
  edge.nbytes = 0;
  for (const value of edge.values) edge.nbytes += value.nbytes;
  if (sideA !== sideB) {
    for (const kind of ["recomputed", "offloaded", "saved"])
      for (const value of edge.values) if (value.kind === kind) edge.crossing = kind;
    points = [[a.x + a.w, a.y + a.h / 2], [b.x, b.y + b.h / 2]];
    const [[x1, y1], [x2, y2]] = points, bend = Math.max(40, (x2 - x1) / 2);
    path.moveTo(x1, y1);
    path.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    edge.head = headAt(x2, y2, 1, 0);
  } else {
    const down = sideA === "forward";
    points = pointsBetween(edge, a, b, down, scene);
    edge.quiet = isOfStrangers(edge);
    path.moveTo(...points[0]);
    for (let i = 1; i < points.length; i++) {
      const [x1, y1] = points[i - 1], [x2, y2] = points[i];
      const bend = (y2 - y1) / 2;
      path.bezierCurveTo(x1, y1 + bend, x2, y2 - bend, x2, y2);
    }
    edge.head = headAt(...points[points.length - 1], 0, down ? 1 : -1);
  }
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  edge.bounds = { x: Math.min(...xs), y: Math.min(...ys) };
  edge.bounds.w = Math.max(...xs) - edge.bounds.x + 1;
  edge.bounds.h = Math.max(...ys) - edge.bounds.y + 1;
  edge.path = path;
  return edge;
}

// From box to box, through the lanes between them in the module that contains both.
function pointsBetween(edge, a, b, down, scene) {
  let [from, to] = [edge.from, edge.to];
  while (from.parent.depth > to.parent.depth) from = from.parent;
  while (to.parent.depth > from.parent.depth) to = to.parent;
  while (from.parent !== to.parent) [from, to] = [from.parent, to.parent];
  const rank = rowsOf(from.parent), lanes = scene.lanes.get(from)?.[edge.sides[0]];
  const step = Math.sign(rank.get(to) - rank.get(from)), ways = [];
  for (let row = rank.get(from) + step; step && row !== rank.get(to); row += step) {
    const way = lanes?.get(row);
    if (way) ways.push([way.x, down ? way.top : way.bottom], [way.x, down ? way.bottom : way.top]);
  }
  const middle = (box) => box.x + box.w / 2;
  const port = (box, towards) => {
    const room = box.w * 0.32;
    return middle(box) + Math.max(-room, Math.min(room, (towards - middle(box)) * 0.5));
  };
  const first = ways.length ? ways[0][0] : middle(b);
  const last = ways.length ? ways[ways.length - 1][0] : middle(a);
  const start = [port(a, first), down ? a.y + a.h : a.y];
  const end = [port(b, last), down ? b.y : b.y + b.h];
  return [start, ...ways, end];
}

// Whether an edge comes from a parameter or an input of another module, such as tied weights. It is
// drawn only when it is selected: such edges cross the whole graph.
function isOfStrangers(edge) {
  if (!["parameter", "input", "constant"].includes(edge.from.value?.kind)) return false;
  for (let m = edge.to.parent; m; m = m.parent) if (m === edge.from.parent) return false;
  return true;
}

function headAt(x, y, dx, dy) {
  const head = new Path2D();
  head.moveTo(x, y);
  head.lineTo(x - 7 * dx - 3 * dy, y - 7 * dy - 3 * dx);
  head.lineTo(x - 7 * dx + 3 * dy, y - 7 * dy + 3 * dx);
  head.closePath();
  return head;
}

// All edges within a pass as few paths, since many strokes are slow: by bytes, in three widths.
function pathsOf(edges) {
  const found = [1, 1.8, 3].map((width) => ({ width, path: new Path2D(), heads: new Path2D() }));
  const flows = edges.filter((edge) => edge.sides[0] === edge.sides[1] && !edge.quiet);
  const most = flows.reduce((m, edge) => Math.max(m, edge.nbytes), 1);
  for (const edge of flows) {
    const share = edge.nbytes / most;
    const group = found[share > 0.5 ? 2 : share > 0.1 ? 1 : 0];
    group.path.addPath(edge.path);
    group.heads.addPath(edge.head);
  }
  return found;
}
