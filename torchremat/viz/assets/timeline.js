// The bytes alive at each operator of a step, stacked by what they are.

const CATEGORIES = DATA.stack; // from the lowest up
const MARGIN = { left: 74, right: 16, top: 22, bottom: 24 };

class TimelineView {
  constructor(canvas, picture, values, app) {
    Object.assign(this, { canvas, picture, values, app, step: null, hovered: null });
    this.data = picture.timeline;
    this.context = canvas.getContext("2d");
    this.stacks = stacksOf(this.data);
    this.length = this.data.live.length;
    this.peak = this.data.live.reduce((best, live, i) => (live > this.data.live[best] ? i : best), 0);
    this.setResident(picture.residentCounts);
    this.mark = null; // the value whose lifetimes are marked
    this._listen();
  }

  // Sets whether parameters and inputs, which are always alive, are drawn below the rest.
  setResident(shown) {
    const total = this.picture.resident.reduce((all, [, nbytes]) => all + nbytes, 0);
    this.resident = shown ? total : 0;
    this.most = this.data.live[this.peak] + this.resident;
    const above = this.picture.residentCounts ? 0 : this.resident;
    this.levels = this.picture.levels.map(([text, nbytes]) => [text, nbytes + above]);
  }

  resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    Object.assign(this, { width, height, ratio });
  }

  // The values alive at a step: [position, bytes, category], the largest first.
  aliveAt(step) {
    const found = this.data.lifetimes.filter(([, , , first, last]) => first <= step && step <= last);
    return found.map(([index, nbytes, category]) => [index, nbytes, CATEGORIES[category]])
      .filter(([, nbytes]) => nbytes).sort((a, b) => b[1] - a[1]);
  }

  lifetimesOf(value) {
    return this.data.lifetimes.filter(([index]) => index === value.index);
  }

  left(step) {
    return MARGIN.left + ((this.width - MARGIN.left - MARGIN.right) * step) / this.length;
  }

  // The bytes at the top: the peak of all views, or a level that is not far above it.
  get full() {
    const most = Math.max(this.most, this.app.mostBytes ?? 0);
    const near = this.levels.map(([, n]) => n).filter((n) => n <= 1.35 * most);
    return Math.max(most, ...near) * 1.05;
  }

  top(nbytes) {
    const most = this.full;
    return this.height - MARGIN.bottom
      - ((this.height - MARGIN.top - MARGIN.bottom) * nbytes) / Math.max(most, 1);
  }

  stepAt(px) {
    const share = (px - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    return Math.min(this.length - 1, Math.max(0, Math.floor(share * this.length)));
  }

  // The middle of the peak on the page, for tests.
  wherePeak() {
    const { left, top } = this.canvas.getBoundingClientRect();
    return { x: left + this.left(this.peak + 0.5), y: top + this.top(this.most) + 2 };
  }

  draw() {
    const c = this.context, colours = this.app.colours;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = colours.paper;
    c.fillRect(0, 0, this.width, this.height);
    this._axes(c, colours);
    this._areas(c, colours);
    this._levels(c, colours);
    if (this.mark) this._lifetimes(c, colours);
    this._peak(c, colours);
    for (const [step, colour] of [[this.hovered, colours.quiet], [this.step, colours.accent]]) {
      if (step === null) continue;
      c.fillStyle = colour;
      c.fillRect(this.left(step + 0.5) - 1, MARGIN.top - 6, 2, this.height - MARGIN.top - MARGIN.bottom + 6);
    }
  }

  _axes(c, colours) {
    const most = this.full;
    let unit = 2 ** Math.floor(Math.log2(Math.max(most / 4, 1)));
    if (most / unit > 6) unit *= 2;
    c.font = `11px ${FONT}`;
    c.textAlign = "right";
    for (let nbytes = 0; nbytes <= most; nbytes += unit) {
      const y = Math.round(this.top(nbytes)) + 0.5;
      c.fillStyle = colours.quiet;
      c.fillText(humanBytes(nbytes), MARGIN.left - 8, y + 4);
      c.fillStyle = colours.line;
      c.fillRect(MARGIN.left, y, this.width - MARGIN.left - MARGIN.right, 1);
    }
    c.textAlign = "left";
    const middle = this.left(this.data.backward), y = this.height - 8;
    c.fillStyle = colours.quiet;
    c.fillText("forward →", MARGIN.left, y);
    if (this.data.backward < this.length) {
      c.fillText("backward →", middle + 6, y);
      c.fillRect(middle, MARGIN.top, 1, this.height - MARGIN.top - 4);
    }
    c.textAlign = "right";
    c.fillText(`${this.length} operators`, this.width - MARGIN.right, y);
    c.textAlign = "left";
  }

  _areas(c, colours) {
    const base = new Float64Array(this.length).fill(this.resident);
    if (this.resident) {
      c.fillStyle = fillOf("resident");
      const top = this.top(this.resident);
      c.fillRect(MARGIN.left, top, this.width - MARGIN.left - MARGIN.right, this.top(0) - top);
    }
    for (const category of CATEGORIES) {
      const values = this.stacks[category];
      if (!values.some((nbytes) => nbytes)) continue;
      c.beginPath();
      c.moveTo(this.left(0), this.top(base[0]));
      for (let i = 0; i < this.length; i++) {
        const y = this.top(base[i] + values[i]);
        c.lineTo(this.left(i), y);
        c.lineTo(this.left(i + 1), y);
      }
      for (let i = this.length - 1; i >= 0; i--) {
        const y = this.top(base[i]);
        c.lineTo(this.left(i + 1), y);
        c.lineTo(this.left(i), y);
        base[i] += values[i];
      }
      c.closePath();
      c.fillStyle = fillOf(category);
      c.fill();
      c.lineWidth = 0.6;
      c.strokeStyle = colours.outline;
      c.stroke();
    }
  }

  _levels(c, colours) {
    const above = this.levels.filter(([, nbytes]) => nbytes > this.full);
    c.font = `11px ${FONT}`;
    c.textAlign = "right";
    c.fillStyle = colours.quiet;
    c.fillText(above.map(([text, nbytes]) => `↑ ${text} ${humanBytes(nbytes)}`).join("   "),
      this.width - MARGIN.right - 2, MARGIN.top - 8);
    c.fillStyle = c.strokeStyle = colours.ink;
    c.textAlign = "left";
    let end = [0, 0]; // of the text before: the next at about this height stands beside it
    for (const [text, nbytes] of this.levels.filter((level) => !above.includes(level))) {
      const y = this.top(nbytes);
      c.setLineDash([6, 4]);
      c.lineWidth = 1;
      c.beginPath();
      c.moveTo(MARGIN.left, y);
      c.lineTo(this.width - MARGIN.right, y);
      c.stroke();
      c.setLineDash([]);
      const said = `${text} ${humanBytes(nbytes)}`;
      const x = Math.abs(y - end[1]) < 14 ? end[0] + 14 : MARGIN.left + 4;
      c.fillText(said, x, y - 4);
      end = [x + c.measureText(said).width, y];
    }
    c.textAlign = "left";
  }

  _lifetimes(c, colours) {
    for (const [, , , first, last] of this.lifetimesOf(this.mark)) {
      const x = this.left(first), w = Math.max(2, this.left(last + 1) - x);
      c.fillStyle = colours.accentFaint;
      c.fillRect(x, MARGIN.top, w, this.top(0) - MARGIN.top);
      c.fillStyle = colours.accent;
      c.fillRect(x, this.top(0), w, 4);
      c.fillRect(x, MARGIN.top - 4, w, 4);
    }
  }

  _peak(c, colours) {
    const x = this.left(this.peak + 0.5), y = this.top(this.most);
    c.beginPath();
    c.arc(x, y, 5, 0, 7);
    c.fillStyle = colours.accent;
    c.fill();
    c.strokeStyle = colours.paper;
    c.lineWidth = 1.5;
    c.stroke();
    const text = `peak ${humanBytes(this.most)}`;
    c.font = `600 12px ${FONT}`;
    const w = c.measureText(text).width + 10, right = x + 10 + w < this.width - MARGIN.right;
    const from = right ? x + 9 : x - 9 - w;
    c.fillStyle = colours.paper;
    c.globalAlpha = 0.85;
    c.fillRect(from, y - 9, w, 18);
    c.globalAlpha = 1;
    c.fillStyle = colours.ink;
    c.fillText(text, from + 5, y + 4);
  }

  _listen() {
    const place = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", (event) => {
      this.hovered = this.stepAt(place(event));
      this.app.hoverStep(this, event);
    });
    this.canvas.addEventListener("pointerleave", (event) => {
      this.hovered = null;
      this.app.hoverStep(this, event);
    });
    this.canvas.addEventListener("click", (event) => {
      const step = this.stepAt(place(event));
      const reach = Math.max(1, Math.round((8 * this.length) / this.width)); // 8 pixels
      this.app.selectStep(this, Math.abs(step - this.peak) <= reach ? this.peak : step);
    });
  }
}

// The bytes of each category at each step. Memory that an operator needs inside is temporary.
function stacksOf({ live, lifetimes }) {
  const stacks = {};
  for (const category of CATEGORIES) stacks[category] = new Float64Array(live.length + 1);
  for (const [, nbytes, category, first, last] of lifetimes) {
    stacks[CATEGORIES[category]][first] += nbytes;
    stacks[CATEGORIES[category]][last + 1] -= nbytes;
  }
  for (const stack of Object.values(stacks))
    for (let i = 1; i < stack.length; i++) stack[i] += stack[i - 1];
  for (let i = 0; i < live.length; i++)
    stacks.temporary[i] += live[i] - CATEGORIES.reduce((sum, name) => sum + stacks[name][i], 0);
  for (const category of CATEGORIES) stacks[category] = stacks[category].slice(0, live.length);
  return stacks;
}
