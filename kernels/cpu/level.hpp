// What each phase of a step computes. Included once per level, after attention.hpp.

// Which forms of its inputs a product with the matrix reads.
static Forms forms_read(const Matrix& m, int input_bits) {
  const bool bytes = input_bits == 8 && m.has_codes();
  const bool pairs = !bytes && takes_pairs(m.format), words = !KVFERRY_PAIRS && m.has_codes();
  const bool sums = pairs && m.has_codes() && (adds_minimum(m) || (KVFERRY_AMX && m.format == Format::codes4));
  return {!pairs, pairs, sums, bytes, words, words && input_bits == 32};  // whole numbers are made out of floats
}

// 16 inputs in the forms that are kept, and the sum of what will be multiplied. The second half of a group ends the group.
static inline void put_input(const Rows& rows, int row, int input, V v) {
  const size_t at = size_t(row) * rows.stride + size_t(input);
  if (rows.forms.wide) v_store(rows.wide + at, v);
  if (rows.forms.narrow) v_store_bf16(rows.narrow + at, v);
  if (rows.forms.sums) {
    if (rows.forms.narrow) v = v_load_bf16(rows.narrow + at);
    rows.half_sums[at / kSumWidth] = v_sum(v);
    if (input % kGroup != 0) rows.group_sums[at / kGroup] = rows.half_sums[at / kSumWidth - 1] + rows.half_sums[at / kSumWidth];
  }
  if (rows.forms.are_whole() && input % kGroup != 0) write_whole(rows, row, input / kGroup);
}

// One row of inputs; `values` may be the row's own `wide`.
static inline void write_input(const Rows& rows, int row, int n, const float* values) {
  for (int i = 0; i < rows.stride; i += kSumWidth) {
    V v = v_zero();
    if (i + kSumWidth <= n) {
      v = v_load(values + i);
    } else if (i < n) {
      alignas(64) float tail[kSumWidth] = {};
      for (int j = i; j < n; ++j) tail[j - i] = values[j];
      v = v_load(tail);
    }
    put_input(rows, row, i, v);
  }
}

// to = x / rms(x) * weight (Zhang and Sennrich, RMSNorm, 2019).
static inline void rms_norm(const float* x, const float* weight, int n, float epsilon, float* to) {
  V squares = v_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V v = v_load(x + i);
    squares = v_fma(v, v, squares);
  }
  float sum = v_sum(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / float(n) + epsilon);
  const V s = v_set(scale);
  for (i = 0; i + 16 <= n; i += 16) v_store(to + i, v_mul(v_mul(v_load(x + i), s), v_load(weight + i)));
  for (; i < n; ++i) to[i] = x[i] * scale * weight[i];
}

// One row of a packed matrix as floats.
static inline void matrix_row(const Matrix& m, int row, float* to) {
  const uint8_t* panel = m.data + size_t(row / kPanel) * m.panel_bytes;
  const int lane = row % kPanel;
  const auto half = [](const uint8_t* at) {
    alignas(64) uint16_t lanes[16] = {};
    alignas(64) float wide[16];
    std::memcpy(lanes, at, 2);
    v_store(wide, v_load_half(lanes));
    return wide[0];
  };
  const auto scale_at = [&](const uint8_t* scales) {
    if (m.half_scales) return half(scales + lane * 2);
    float value;
    std::memcpy(&value, scales + lane * 4, 4);
    return value;
  };
  for (int k = 0; k < m.cols; ++k) {
    switch (m.format) {
      case Format::f32: std::memcpy(to + k, panel + (size_t(k) * kPanel + lane) * 4, 4); break;
      case Format::f16: to[k] = half(panel + (size_t(k) * kPanel + lane) * 2); break;
      case Format::bf16: {
        uint16_t bits;
        std::memcpy(&bits, panel + (size_t(k / 2) * 32 + lane * 2 + k % 2) * 2, 2);
        const uint32_t wide = uint32_t(bits) << 16;
        std::memcpy(to + k, &wide, 4);
        break;
      }
      default: {
        const uint8_t* block = panel + size_t(k / m.block) * m.block_bytes();
        const int inner = k % m.block;
        float code;
        if (m.format == Format::codes4) {
          uint16_t word;
          std::memcpy(&word, block + (inner / 8) * 64 + (lane * 2 + inner % 2) * 2, 2);
          code = float(word >> (4 * nibble_of_pair(inner % 8 / 2)) & 15);
        } else {
          code = float(int8_t(block[(inner / 2) * 32 + lane * 2 + inner % 2]));
        }
        const uint8_t* scales = block + m.code_bytes();
        const float scale = scale_at(scales);
        to[k] = scale * code + (m.has_min ? scale_at(scales + m.scale_bytes()) : scale * m.offset);
      }
    }
  }
}

static inline void embed_rows(Step& step, int chunk) {
  const Model& m = step.model;
  const int end = step.batch.rows < (chunk + 1) * step.row_chunk ? step.batch.rows : (chunk + 1) * step.row_chunk;
  for (int row = chunk * step.row_chunk; row < end; ++row) {
    float* residual = step.residual + size_t(row) * step.x.stride;
    matrix_row(m.embedding, int(step.batch.tokens[row]), residual);
    float* wide = step.x.wide + size_t(row) * step.x.stride;
    rms_norm(residual, m.layers[0].attention_norm, m.hidden, m.epsilon, wide);
    write_input(step.x, row, m.hidden, wide);
  }
}

// Norms of `count` rows from the residual into x; `from(i)` is where row i stands.
template <class From>
static inline void norm_rows(Step& step, const float* weight, int first, int end, From&& from) {
  const Model& m = step.model;
  for (int i = first; i < end; ++i) {
    float* wide = step.x.wide + size_t(i) * step.x.stride;
    rms_norm(step.residual + size_t(from(i)) * step.x.stride, weight, m.hidden, m.epsilon, wide);
    write_input(step.x, i, m.hidden, wide);
  }
}

static inline void rotate_head(float* x, const float* cos, const float* sin, int n) {
  const int half = n / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const V a = v_load(x + i), b = v_load(x + half + i);
    v_store(x + i, v_fma(a, v_load(cos + i), v_mul(b, v_load(sin + i))));
    v_store(x + half + i, v_fma(b, v_load(cos + half + i), v_mul(a, v_load(sin + half + i))));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] + b * sin[i];
    x[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

// One token's keys, or values, of one head to their place in a page, where the head's tokens begin at `head`.
static inline void write_kv(const Batch& b, uint8_t* head, size_t place, const float* from, int n) {
  uint8_t* to = head + place * n * item_bytes(b.kv_type);
  if (b.kv_type != KvType::int8) {
    for (int d = 0; d < n; d += 16)
      b.kv_type == KvType::bf16 ? v_store_bf16((uint16_t*)to + d, v_load(from + d)) : v_store((float*)to + d, v_load(from + d));
    return;
  }
  float by;
  const float scale = rounding_step(from, n, kMostCode, by);
  const V inverse = v_set(by), limit = v_set(kMostCode);
  for (int d = 0; d < n; d += 16) {
    const V scaled = v_mul(v_load(from + d), inverse);
    v_store_codes((int8_t*)to + d, v_round(v_max(v_min(scaled, limit), v_sub(v_zero(), limit))));  // NaN becomes a number here
  }
  std::memcpy(head + size_t(b.block_tokens) * n + place * kScaleBytes, &scale, kScaleBytes);
}

static inline void rotate_rows(Step& step, const Layer& layer, int layer_index, int chunk) {
  const Model& m = step.model;
  const Batch& b = step.batch;
  const int D = m.head_dim, width = layer.qkv.panels * kPanel;
  const int end = b.rows < (chunk + 1) * step.row_chunk ? b.rows : (chunk + 1) * step.row_chunk;
  for (int row = chunk * step.row_chunk; row < end; ++row) {
    float* qkv = step.qkv + size_t(row) * width;
    const float* cos = m.cos + size_t(b.positions[row]) * D;
    const float* sin = m.sin + size_t(b.positions[row]) * D;
    for (int h = 0; h < m.heads + m.kv_heads; ++h) {
      const float* norm = h < m.heads ? layer.q_norm : layer.k_norm;
      if (norm) rms_norm(qkv + h * D, norm, D, m.epsilon, qkv + h * D);
      rotate_head(qkv + h * D, cos, sin, D);
    }
    const size_t page = size_t(b.slots[row] / b.block_tokens), place = size_t(b.slots[row] % b.block_tokens);
    for (int half = 0; half < 2; ++half)
      for (int h = 0; h < m.kv_heads; ++h) {
        const size_t head = ((page * m.num_layers + layer_index) * 2 + half) * m.kv_heads + h;
        write_kv(b, b.pages + head * head_bytes(b.kv_type, b.block_tokens, D), place, qkv + (m.heads + half * m.kv_heads + h) * D, D);
      }
  }
}

static inline void attend_item(Step& step, const Layer& layer, int layer_index, int chunk, int thread) {
  const Model& m = step.model;
  const AttentionItem& item = step.items[size_t(chunk)];
  const AttentionGeometry g{layer_index, m.num_layers, m.kv_heads, m.heads / m.kv_heads, m.head_dim, step.batch.block_tokens, m.scale};
  const AttentionScratch s = carve(step.scratch(thread), g.group, g.head_dim);
  const int width = layer.qkv.panels * kPanel;
  const size_t follower = size_t(chunk) + size_t(step.threads());
  const AttentionItem* next = follower < step.items.size() ? &step.items[follower] : nullptr;
  const Sequence& sequence = step.batch.sequences[item.sequence];
  const int rows = item.queries * g.group, D = m.head_dim;
  const int* sharers = item.first_sharer < 0 ? nullptr : step.sharers.data() + item.first_sharer;
  const bool is_cut = step.first_partial[size_t(item.sequence)] >= 0;
  for (int kv_head = item.kv_begin; kv_head < item.kv_end; ++kv_head) {
    switch (step.batch.kv_type) {
      case KvType::f32: attend<KvType::f32>(step.batch, g, item, sharers, kv_head, next, step.qkv, width, s); break;
      case KvType::bf16: attend<KvType::bf16>(step.batch, g, item, sharers, kv_head, next, step.qkv, width, s); break;
      case KvType::int8: attend<KvType::int8>(step.batch, g, item, sharers, kv_head, next, step.qkv, width, s); break;
    }
    if (is_cut) {
      for (int r = 0; r < rows; ++r) {
        const int owner = sharers ? sharers[r / g.group] : item.sequence, at = sharers ? r % g.group : r;
        const size_t partial = size_t(step.first_partial[size_t(owner)] + item.begin * m.kv_heads + kv_head);
        float* to = step.partials + partial * step.partial_floats + size_t(at) * (D + 2);
        for (int d = 0; d < D; d += 16) v_store(to + d, v_load(s.totals + size_t(r) * D + d));
        to[D] = s.highest[r];
        to[D + 1] = s.sums[r];
      }
      continue;
    }
    for (int r = 0; r < rows; ++r) {
      const int row = sequence.first + item.first_query + r / g.group, head = kv_head * g.group + r % g.group;
      float* to = step.attended.wide + size_t(row) * step.attended.stride + size_t(head) * D;
      const V sum = v_set(s.sums[r]);
      for (int d = 0; d < D; d += 16) v_store(to + d, v_div(v_load(s.totals + size_t(r) * D + d), sum));
    }
  }
}

// Merges what items of one sequence left, in the order of partitions, and readies the rows for the next product.
static inline void merge_rows(Step& step, int chunk) {
  const Model& m = step.model;
  const Batch& b = step.batch;
  const int D = m.head_dim, group = m.heads / m.kv_heads;
  const int begin = chunk * step.row_chunk, end = b.rows < begin + step.row_chunk ? b.rows : begin + step.row_chunk;
  int s = 0;
  for (int row = begin; row < end; ++row) {
    while (b.sequences[s].first + b.sequences[s].queries <= row) ++s;
    const Sequence& sequence = b.sequences[s];
    float* attended = step.attended.wide + size_t(row) * step.attended.stride;
    const int first = step.first_partial[size_t(s)];
    if (first >= 0) {
      const int parts = (sequence.context + kPartition - 1) / kPartition, query = row - sequence.first;
      const int position = sequence.context - sequence.queries + query;
      for (int head = 0; head < m.heads; head += 16) {
        const int heads = m.heads - head < 16 ? m.heads - head : 16;
        alignas(64) float values[16 * kMaxHeadDim], keep[16], take[16];
        for (int i = 0; i < heads * D; i += 16) v_store(values + i, v_zero());
        Softmax all;
        v_store(all.highest, v_set(-__builtin_inff()));
        for (int p = 0; p < parts && p * kPartition <= position; ++p) {
          const float* from[16];
          Softmax further;
          for (int h = 0; h < heads; ++h) {
            from[h] = step.partials + size_t(first + p * m.kv_heads + (head + h) / group) * step.partial_floats +
                      size_t(query * group + (head + h) % group) * (D + 2);
            further.highest[h] = from[h][D];
            further.sums[h] = from[h][D + 1];
          }
          merge_sums(all, further, keep, take);
          for (int h = 0; h < heads; ++h) merge_values(values + h * D, from[h], keep[h], take[h], D);
        }
        for (int h = 0; h < heads; ++h) {
          const V sum = v_set(all.sums[h]);
          for (int d = 0; d < D; d += 16) v_store(attended + (head + h) * D + d, v_div(v_load(values + h * D + d), sum));
        }
      }
    }
    write_input(step.attended, row, m.heads * D, attended);
  }
}

// x / (1 + e^-x); `rough`: it will be rounded anyway.
static inline V silu(V x, bool rough) {
#if KVFERRY_PAIRS
  if (rough) return v_div_rough(x, v_add(v_set(1.0f), v_exp2_rough(v_mul(x, v_set(-kLog2E)))));
#endif
  return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x))));
}

static inline void gate_up_chunk(Step& step, const Matrix& m, int chunk, int thread) {
  const Rows to = step.hidden_up;
  const bool rough = !to.forms.wide || to.forms.bytes;
  const auto finish = [=, &m](int row, int pair, V gate, V up) {
    const size_t at = size_t(row) * to.stride + size_t(pair) * kPanel;
    if (to.forms.wide) fetch_below(to.wide + at, size_t(to.stride));
    if (to.forms.narrow) fetch_below(to.narrow + at, size_t(to.stride));
    put_input(to, row, pair * kPanel, v_mul(silu(gate, rough), up));
    // Inputs beyond the last panel meet weights of zero, but what lies there may be another batch's, and not finite.
    for (int i = (pair + 1) * kPanel; 2 * pair + 2 == m.panels && i < to.stride; i += kPanel) put_input(to, row, i, v_zero());
  };
  product_chunk(m, step.x, step.batch.rows, step.cut_gate_up, chunk, step.scratch(thread), [=](const Tile& tile) {
    for (int r = 0; r < tile.rows; ++r) {
      const int row = tile.row + r;
      for (int c = 0; c + 1 < tile.columns; c += 2) finish(row, (tile.panel + c) / 2, tile.at(r, c), tile.at(r, c + 1));
      if (tile.columns > 1) continue;
      float* gate = to.wide + size_t(row) * to.stride + size_t(tile.panel / 2) * kPanel;
      if (tile.panel % 2 == 0) {  // it waits for its up, which is the next panel of the same chunk
        v_store(gate, tile.at(r, 0));
      } else {
        finish(row, tile.panel / 2, v_load(gate), tile.at(r, 0));
      }
    }
  });
}

static inline void add_chunk(Step& step, const Matrix& m, const Rows& from, const Cut& cut, int chunk, int thread) {
  const size_t stride = size_t(step.x.stride);
  product_chunk(m, from, step.batch.rows, cut, chunk, step.scratch(thread), [residual = step.residual, stride](const Tile& tile) {
    float* to = residual + size_t(tile.row) * stride + size_t(tile.panel) * kPanel;
    for (int r = 0; r < tile.rows; ++r, to += stride)
      for (int c = 0; c < tile.columns; ++c) {
        fetch_below(to + c * kPanel, stride);
        v_store(to + c * kPanel, v_add(v_load(to + c * kPanel), tile.at(r, c)));
      }
  });
}

static inline void head_chunk(Step& step, int chunk, int thread) {
  product_chunk(step.model.head, step.x, step.batch.num_sampled, step.cut_head, chunk, step.scratch(thread),
                [to = step.batch.logits, n = step.model.vocabulary](const Tile& tile) { put_tile(tile, to, size_t(n), n); });
}

// The first of a row's highest logits, and whether all are finite.
static inline void pick_row(Step& step, int row) {
  const int n = step.model.vocabulary;
  const float* logits = step.batch.logits + size_t(row) * n;
  V top = v_set(-__builtin_inff()), poison = v_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V v = v_load(logits + i);
    top = v_max(v, top);
    poison = v_fma(v, v_zero(), poison);  // NaN once anything is not finite
  }
  float best = v_highest(top), bad = v_sum(poison);
  for (; i < n; ++i) {
    best = logits[i] > best ? logits[i] : best;
    bad += logits[i] * 0.0f;
  }
  step.batch.finite[row] = bad == 0.0f;
  int64_t at = 0;
  if (bad == 0.0f)
    while (logits[at] != best) ++at;
  step.batch.greedy[row] = at;
}

static void run_chunk(Step& step, Phase phase, int layer_index, int chunk, int thread) {
  const Model& m = step.model;
  const Layer& layer = m.layers[layer_index];
  const int first = chunk * step.row_chunk;
  const auto until = [&](int rows) { return rows < first + step.row_chunk ? rows : first + step.row_chunk; };
  switch (phase) {
    case Phase::embed: embed_rows(step, chunk); break;
    case Phase::qkv: {
      const int width = layer.qkv.panels * kPanel;
      product_chunk(layer.qkv, step.x, step.batch.rows, step.cut_qkv, chunk, step.scratch(thread),
                    [to = step.qkv, width](const Tile& tile) { put_tile(tile, to, size_t(width), width); });
      break;
    }
    case Phase::rotate: rotate_rows(step, layer, layer_index, chunk); break;
    case Phase::attend: attend_item(step, layer, layer_index, chunk, thread); break;
    case Phase::merge: merge_rows(step, chunk); break;
    case Phase::output: add_chunk(step, layer.output, step.attended, step.cut_output, chunk, thread); break;
    case Phase::mlp_norm: norm_rows(step, layer.mlp_norm, first, until(step.batch.rows), [](int i) { return i; }); break;
    case Phase::gate_up: gate_up_chunk(step, layer.gate_up, chunk, thread); break;
    case Phase::down: add_chunk(step, layer.down, step.hidden_up, step.cut_down, chunk, thread); break;
    case Phase::next_norm:
      if (layer_index + 1 < m.num_layers) {
        norm_rows(step, m.layers[layer_index + 1].attention_norm, first, until(step.batch.rows), [](int i) { return i; });
      } else {
        norm_rows(step, m.final_norm, first, until(step.batch.num_sampled), [&](int i) { return int(step.batch.sampled[i]); });
      }
      break;
    case Phase::head: head_chunk(step, chunk, thread); break;
    case Phase::pick: pick_row(step, chunk); break;
  }
}

static size_t scratch_bytes(const Model& m) {
  size_t most = attention_bytes(m.heads / m.kv_heads, m.head_dim);
  const auto consider = [&](const Matrix& matrix) {
    const size_t bytes = unpacked_bytes(matrix);
    if (bytes > most) most = bytes;
  };
  consider(m.head);
  for (int i = 0; i < m.num_layers; ++i) {
    consider(m.layers[i].qkv);
    consider(m.layers[i].output);
    consider(m.layers[i].gate_up);
    consider(m.layers[i].down);
  }
  return most;
}
