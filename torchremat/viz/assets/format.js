// The data of the page, and numbers as the text reports print them.

const DATA = JSON.parse(document.getElementById("data").textContent);

function humanBytes(nbytes) {
  if (Math.abs(nbytes) < 1024) return `${nbytes} B`;
  let size = nbytes, unit;
  for (unit of ["KiB", "MiB", "GiB", "TiB"]) {
    size /= 1024;
    if (Math.abs(size) < 999.5) break;
  }
  const a = Math.abs(size);
  return `${size.toFixed(a < 9.995 ? 2 : a < 99.95 ? 1 : 0)} ${unit}`;
}

function humanSeconds(seconds) {
  if (!seconds) return "0 us";
  const units = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
  const [unit, size] = units.find(([, s]) => Math.abs(seconds) >= s) ?? units[2];
  const value = seconds / size, a = Math.abs(value);
  return `${value.toFixed(a < 10 ? 2 : a < 100 ? 1 : 0)} ${unit}`;
}

// An element with attributes and children. `append` takes text as text, never as HTML: names of a
// user's modules can't inject any.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// `text`, cut so that it is at most `width` wide; widths are those of the context's font.
function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "…").width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}
