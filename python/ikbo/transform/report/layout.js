"use strict";
// Places of boxes: in layers, each below what it reads, near its neighbours.

const GAP_X = 14, GAP_Y = 34, BOX_HEIGHT = 34;

// `boxes` in the program's order with `key`, `inputs` and `width`; sets `x` (left) and `y` (top) and
// returns the size of the picture. Linear in boxes and edges, but for sorting.
function place(boxes) {
  const byKey = new Map(boxes.map((box, i) => [box.key, Object.assign(box, { order: i })]));
  for (const box of boxes) {
    // A closed module may read what reads it: such an edge does not count for the layers.
    box.from = [...box.inputs].map((key) => byKey.get(key)).filter((other) => other.order < box.order);
    box.to = [];
    box.layer = 0;
  }
  for (const box of boxes) {
    for (const other of box.from) {
      other.to.push(box);
      box.layer = Math.max(box.layer, other.layer + 1);
    }
  }
  // What reads nothing stands right above the first that reads it.
  for (const box of boxes) {
    if (!box.from.length && box.to.length) {
      box.layer = Math.min(...box.to.map((other) => other.layer)) - 1;
    }
  }
  const layers = [];
  for (const box of boxes) (layers[box.layer] ??= []).push(box);
  for (const layer of layers) pack(layer, () => 0);
  for (let sweep = 0; sweep < 6; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) {
      const wish = new Map(layer.map((box) => [box, middle(down ? box.from : box.to, box)]));
      layer.sort((a, b) => wish.get(a) - wish.get(b) || a.order - b.order);
      pack(layer, (box) => wish.get(box));
    }
  }
  const left = boxes.reduce((least, box) => Math.min(least, box.x), Infinity);
  let right = 0;
  for (const box of boxes) {
    box.x -= left;
    box.y = box.layer * (BOX_HEIGHT + GAP_Y);
    right = Math.max(right, box.x + box.width);
  }
  return { width: right, height: layers.length * (BOX_HEIGHT + GAP_Y) - GAP_Y };
}

function middle(others, box) {
  if (!others.length) return box.x + box.width / 2;
  return others.reduce((sum, other) => sum + other.x + other.width / 2, 0) / others.length;
}

// Boxes side by side in the layer's order, as near as they can be to where their middles should be.
function pack(layer, wish) {
  let edge = -Infinity, off = 0;
  for (const box of layer) {
    const left = wish(box) - box.width / 2;
    box.x = Math.max(left, edge);
    edge = box.x + box.width + GAP_X;
    off += box.x - left;
  }
  for (const box of layer) box.x -= off / layer.length;
}
