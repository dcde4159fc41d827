"use strict";
// One picture: the boxes of one program as SVG, with pan and zoom.

const KINDS = ["user", "candidate", "mixed", "constant"];

function element(name, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

class View {
  // `onPick(box)` is called for a click on a box.
  constructor(panel, onPick) {
    this.panel = panel;
    this.onPick = onPick;
    this.svg = panel.appendChild(element("svg", { role: "img", "aria-label": panel.id }));
    this.content = this.svg.appendChild(element("g"));
    this.at = { x: 0, y: 0, scale: 1 };
    const zoom = panel.appendChild(document.createElement("div"));
    zoom.className = "zoom";
    for (const [text, title, act] of [
      ["+", "zoom in", () => this.zoom(1.4)], ["−", "zoom out", () => this.zoom(1 / 1.4)],
      ["fit", "show all", () => this.fit()],
    ]) {
      const button = zoom.appendChild(document.createElement("button"));
      Object.assign(button, { textContent: text, title, onclick: act });
    }
    this.listen();
  }

  listen() {
    this.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = this.svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
    let start = null;
    this.svg.addEventListener("pointerdown", (event) => {
      start = { x: event.clientX - this.at.x, y: event.clientY - this.at.y };
    });
    window.addEventListener("pointermove", (event) => {
      if (start) this.move(event.clientX - start.x, event.clientY - start.y, this.at.scale);
    });
    window.addEventListener("pointerup", () => { start = null; });
  }

  move(x, y, scale) {
    this.at = { x, y, scale };
    this.content.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
  }

  zoom(factor, x = this.svg.clientWidth / 2, y = this.svg.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.02, this.at.scale * factor));
    const grown = scale / this.at.scale;
    this.move(x - (x - this.at.x) * grown, y - (y - this.at.y) * grown, scale);
  }

  // All of the picture, or its top where all would be too small to read.
  fit() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    const all = Math.min((width - 24) / this.size.width, (height - 24) / this.size.height);
    const scale = all < 0.5 ? 0.7 : Math.min(1.2, all);
    const x = (width - this.size.width * scale) / 2;
    this.move(x, 12, scale);
  }

  centre(box) {
    const scale = Math.max(this.at.scale, 0.8);
    const x = this.svg.clientWidth / 2 - (box.x + box.width / 2) * scale;
    this.move(x, this.svg.clientHeight / 2 - box.y * scale, scale);
  }

  // Draws boxes with `cost`, `costs` (per kind), `label`, `isBlocked` and `note`.
  draw(boxes) {
    const begin = performance.now();
    const most = Math.max(...boxes.map((box) => box.cost), 1);
    for (const box of boxes) box.width = 84 + 176 * Math.sqrt(box.cost / most);
    this.size = place(boxes);
    this.boxes = boxes;
    const edges = element("g"), shapes = element("g");
    this.edges = [];
    for (const box of boxes) {
      for (const other of box.from) {
        const path = edges.appendChild(element("path", { class: "edge", d: curve(other, box) }));
        this.edges.push({ path, from: other, to: box });
      }
      shapes.appendChild(this.shape(box));
    }
    this.content.replaceChildren(edges, shapes);
    this.svg.dataset.layoutMs = (performance.now() - begin).toFixed(1);
  }

  shape(box) {
    const classes = ["node", box.kind, box.isBlocked && "blocked", box.module && "module"];
    const group = element("g", {
      class: classes.filter(Boolean).join(" "), "data-name": box.key,
      transform: `translate(${box.x} ${box.y})`,
    });
    group.appendChild(element("title", {}, box.note));
    group.appendChild(element("rect", { class: "box", width: box.width, height: BOX_HEIGHT, rx: 5 }));
    const total = KINDS.reduce((sum, kind) => sum + box.costs[kind], 0);
    let x = 1;
    for (const kind of KINDS) {
      const width = total ? (box.width - 2) * box.costs[kind] / total : 0;
      if (!width) continue;
      const share = { class: "share " + kind, x, y: 1, width, height: BOX_HEIGHT - 2, rx: 4 };
      group.appendChild(element("rect", share));
      x += width;
    }
    const letters = Math.floor((box.width - 12) / 6.4);
    const label = box.label.length > letters ? box.label.slice(0, letters - 1) + "…" : box.label;
    group.appendChild(element("text", { x: 7, y: 14 }, label));
    group.appendChild(element("text", { class: "cost", x: 7, y: 27 }, box.sub));
    group.addEventListener("click", () => this.onPick(box));
    box.group = group;
    return group;
  }

  mark(isPicked) {
    for (const box of this.boxes) box.group.classList.toggle("picked", isPicked(box));
    for (const { path, from, to } of this.edges) {
      path.classList.toggle("picked", isPicked(from) || isPicked(to));
    }
  }
}

function curve(from, to) {
  const x1 = from.x + from.width / 2, y1 = from.y + BOX_HEIGHT;
  const x2 = to.x + to.width / 2, y2 = to.y, bend = Math.min((y2 - y1) / 2, 60);
  return `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
}
