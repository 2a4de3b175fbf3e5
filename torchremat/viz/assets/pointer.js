// Zooming, moving, hovering and clicking with the pointer on a graph.

function listen(view) {
  const { canvas, app } = view;
  let grip = null;
  const place = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey || !event.shiftKey)
      view.zoom(Math.exp(-event.deltaY * 0.0016), ...place(event));
    app.moved(view);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    grip = { from: place(event), x: view.x, y: view.y, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!grip) {
      const found = view.at(x, y);
      canvas.style.cursor = found?.item.value || found?.onHead ? "pointer" : "grab";
      app.hover(view, found, event);
      return;
    }
    const dx = x - grip.from[0], dy = y - grip.from[1];
    grip.moved ||= Math.hypot(dx, dy) > 4;
    if (!grip.moved) return;
    Object.assign(view, { x: grip.x + dx, y: grip.y + dy });
    app.hover(view, null, event);
    app.moved(view);
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = grip && !grip.moved;
    grip = null;
    if (clicked) app.clicked(view, view.at(...place(event)));
  });
  canvas.addEventListener("pointerleave", (event) => app.hover(view, null, event));
}
