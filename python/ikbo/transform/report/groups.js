"use strict";
// Operators joined into the boxes of closed modules.

// The closed modules that hold `path`, outermost first: a path is "tower.0.act".
function prefixes(path) {
  const parts = path ? path.split(".") : [];
  return parts.map((_, i) => parts.slice(0, i + 1).join("."));
}

// The boxes to draw: operators, or modules that are not in `open` with all that is in them. In the
// program's order, each with the keys of the boxes that it reads.
function boxesOf(nodes, open) {
  const boxes = new Map(), keyOf = new Map();
  for (const node of nodes) {
    const closed = prefixes(node.module).find((path) => !open.has(path));
    const key = closed === undefined ? node.name : "module " + closed;
    keyOf.set(node.name, key);
    if (!boxes.has(key)) boxes.set(key, { key, module: closed, nodes: [], inputs: new Set() });
    boxes.get(key).nodes.push(node);
  }
  for (const node of nodes) {
    const key = keyOf.get(node.name);
    for (const input of node.inputs) {
      if (keyOf.get(input) !== key) boxes.get(key).inputs.add(keyOf.get(input));
    }
  }
  return [...boxes.values()];
}

// The modules to open so that those of `depth` levels are closed.
function openedTo(nodes, depth) {
  const open = new Set();
  for (const node of nodes) for (const path of prefixes(node.module).slice(0, depth)) open.add(path);
  return open;
}
