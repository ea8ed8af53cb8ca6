// A harness in JavaScript: goldenppo check "cmd: node examples/harness.mjs"
//
// Reads one JSON message a line on stdin, writes one answer a line on stdout (docs/process.md). Replace the functions below
// by calls of your own code. Inputs are nested lists; numbers that are not finite come and go as "nan", "inf" and "-inf".
import { createInterface } from "node:readline";

const zip = (f, ...grids) => grids[0].map((row, b) => row.map((_, t) => f(...grids.map((grid) => grid[b][t]))));
const sum = (grid) => grid.flat().reduce((total, x) => total + x, 0);
const count = (mask) => mask.flat().filter(Boolean).length;
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));

const OPS = {
  policy_loss({ logprobs, old_logprobs, advantages, mask }, { clip_low, clip_high, dual_clip }) {
    if (dual_clip != null) throw new Unsupported("takes no dual_clip");
    const n = count(mask);
    const terms = zip((l, o, A, m) => {
      if (!m) return { loss: 0, slope: 0 };
      const r = Math.exp(l - o);
      const plain = -A * r;
      const clipped = -A * clip(r, 1 - clip_low, 1 + clip_high);
      return { loss: Math.max(plain, clipped), slope: plain >= clipped ? plain : 0 };
    }, logprobs, old_logprobs, advantages, mask);
    return {
      outputs: { loss: sum(zip((term) => term.loss, terms)) / n },
      gradients: { logprobs: zip((term) => term.slope / n, terms) },
    };
  },

  value_loss({ values, old_values, returns, mask }, { clip: width }) {
    const n = count(mask);
    const terms = zip((v, o, R, m) => {
      if (!m) return { loss: 0, slope: 0 };
      const plain = (v - R) ** 2;
      if (width == null) return { loss: plain, slope: v - R };
      const near = clip(v, o - width, o + width);
      const clipped = (near - R) ** 2;
      return { loss: Math.max(plain, clipped), slope: plain >= clipped ? v - R : near === v ? v - R : 0 };
    }, values, old_values, returns, mask);
    return {
      outputs: { loss: sum(zip((term) => term.loss, terms)) / 2 / n },
      gradients: { values: zip((term) => term.slope / n, terms) },
    };
  },

  kl_penalty({ logprobs, ref_logprobs }) {
    return { outputs: { kl: zip((l, r) => l - r, logprobs, ref_logprobs) } };
  },

  gae({ rewards, values, mask }, { gamma, lam }) {
    const advantages = rewards.map((row) => row.map(() => 0));
    mask.forEach((row, b) => {
      let next = 0, advantage = 0;
      for (let t = row.length - 1; t >= 0; t--) {
        if (!row[t]) continue; // tool output inside a response is stepped over
        advantage = rewards[b][t] + gamma * next - values[b][t] + gamma * lam * advantage;
        next = values[b][t];
        advantages[b][t] = advantage;
      }
    });
    return { outputs: { advantages, returns: zip((A, v, m) => (m ? A + v : 0), advantages, values, mask) } };
  },

  reward_model_loss({ chosen, rejected }, { margin }) {
    const ahead = chosen.map((c, i) => c - rejected[i] - (margin ? margin[i] : 0));
    const slope = ahead.map((d) => -sigmoid(-d) / ahead.length);
    return {
      outputs: { loss: ahead.reduce((total, d) => total + softplus(-d), 0) / ahead.length },
      gradients: { chosen: slope, rejected: slope.map((s) => -s) },
    };
  },
};

class Unsupported extends Error {}

const map = (x, f) => (Array.isArray(x) ? x.map((item) => map(item, f)) : f(x));
const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const read = (x) => map(x, (item) => (item in WORDS ? WORDS[item] : item));
const write = (x, round) => map(x, (item) => (Number.isFinite(item) ? round(item) : Number.isNaN(item) ? "nan" : item > 0 ? "inf" : "-inf"));
const each = (object, f) => Object.fromEntries(Object.entries(object ?? {}).map(([name, value]) => [name, f(value)]));

function answer(request) {
  if (request.cmd === "hello") return { hello: { name: "node-harness", version: "1.0", ops: each(OPS, () => ({})) } };
  if (!["float64", "float32"].includes(request.dtype)) return { unsupported: `JavaScript has no ${request.dtype}` };
  const round = request.dtype === "float32" ? Math.fround : (x) => x;
  try {
    const made = OPS[request.op](each(request.inputs, read), each(request.params, read));
    return { result: { outputs: each(made.outputs, (x) => write(x, round)), gradients: each(made.gradients, (x) => write(x, round)) } };
  } catch (problem) {
    return problem instanceof Unsupported ? { unsupported: problem.message } : { error: String(problem) };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.cmd === "stop") break;
  console.log(JSON.stringify({ seq: request.seq, ...answer(request) }));
}
