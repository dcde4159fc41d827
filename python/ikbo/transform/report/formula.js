"use strict";
// Formulas of the spec, "8*U*B^2 + 12": sums of a number times powers of U and B.

function evaluate(text, users, candidates) {
  let total = 0;
  for (const term of text.split(" + ")) {
    let value = 1;
    for (const piece of term.split("*")) {
      const [symbol, power] = piece.split("^");
      const base = symbol === "U" ? users : symbol === "B" ? candidates : Number(symbol);
      value *= base ** Number(power ?? 1);
    }
    total += value;
  }
  return total;
}

// 1234567 as "1.23 M".
function short(value) {
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= size) return (value / size).toPrecision(3) + unit;
  }
  return value ? value.toPrecision(3).replace(/\.?0+$/, "") : "0";
}
