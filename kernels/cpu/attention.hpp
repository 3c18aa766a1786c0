// Causal attention over pages, the same arithmetic for one row as for a thousand.
//
// A row's keys are cut into partitions of 256 tokens, counted from the beginning of its sequence. Within a partition the
// highest score is found first, then the weights, their sum and the weighted values; partitions are merged in order
// (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). Long contexts of decoding rows are shared
// out by partition and merged afterwards: the same steps, hence the same bits, as when one core does them in turn.
// Weights beyond a row's position are exactly zero, so what a tile computes there changes nothing.
//
// Keys of 16 tokens, transposed, are a panel like a matrix's; so are 16 values of all tokens. The query heads that
// share a KV head are rows of one tile: each key and value is read once for all of them.
// Included once per level, after pages.hpp.

constexpr float kLog2E = 1.44269504088896341f;

static inline V v_exp(V x) {
  // e^x = 2^n * e^r, |r| <= ln(2) / 2, polynomial of degree 6 (Cephes, expf). 0 below -87, where floats end; what is
  // above 88 counts as 88, because beyond it 2^n has no exponent. NaN stays NaN.
  const V within = v_max(v_set(-88.0f), v_min(v_set(88.0f), x));
  const V n = v_round(v_mul(within, v_set(kLog2E)));
  V r = v_fma(n, v_set(-0.693359375f), within);
  r = v_fma(n, v_set(2.12194440e-4f), r);
  V y = v_set(1.9875691500e-4f);
  y = v_fma(y, r, v_set(1.3981999507e-3f));
  y = v_fma(y, r, v_set(8.3334519073e-3f));
  y = v_fma(y, r, v_set(4.1665795894e-2f));
  y = v_fma(y, r, v_set(1.6666665459e-1f));
  y = v_fma(y, r, v_set(5.0000001201e-1f));
  y = v_fma(y, v_mul(r, r), v_add(r, v_set(1.0f)));
  return v_zero_below(v_mul(y, v_exp2i(n)), x, -87.0f);
}

// What n values are rounded to whole numbers of at most `most` by, and what such a number then counts: NaN where a value is
// not finite. What is so small has no inverse, and counts as nothing.
static inline float rounding_step(const float* x, int n, float most, float& inverse) {
  V top = v_zero(), poison = v_zero();
  for (int i = 0; i < n; i += 16) {
    const V v = v_load(x + i);
    top = v_max(top, v_max(v, v_sub(v_zero(), v)));
    poison = v_fma(v, v_zero(), poison);
  }
  const float highest = v_highest(top);
  inverse = highest > 1e-30f ? most / highest : 0.0f;
  return highest / most + v_sum(poison);
}

// What partitions gave for up to 16 rows: highest scores and sums of weights, a row in each lane.
struct Softmax {
  alignas(64) float highest[16] = {}, sums[16] = {};
};

// Takes a further partition into `all`. `keep` and `take`: by what the values of `all`, and the further ones, count now.
static inline void merge_sums(Softmax& all, const Softmax& further, float keep[16], float take[16]) {
  const V before = v_load(all.highest), after = v_load(further.highest), top = v_max(before, after);
  const V k = v_exp(v_sub(before, top)), t = v_exp(v_sub(after, top));
  v_store(keep, k);
  v_store(take, t);
  v_store(all.sums, v_fma(v_load(all.sums), k, v_mul(v_load(further.sums), t)));
  v_store(all.highest, top);
}

static inline void merge_values(float* all, const float* further, float keep, float take, int width) {
  const V k = v_set(keep), t = v_set(take);
  for (int d = 0; d < width; d += 16) v_store(all + d, v_fma(v_load(all + d), k, v_mul(v_load(further + d), t)));
}

// Bytes between panels of keys.
template <KvType K>
static inline constexpr size_t key_bytes(int head_dim) {
  return size_t(head_dim) * 16 * kPackedBytes<K>;
}

// Bytes between panels of values; what stands behind each other would fall into few sets of a cache otherwise.
template <KvType K>
static inline constexpr size_t value_bytes() {
  return size_t(kPartition) * 16 * kPackedBytes<K> + 64;
}

constexpr float kMostWord = 32767.0f;
constexpr int kSpareRows = 16;  // behind the last, so that a tile may reach beyond it

// Scratch of one thread for attention; sizes in `attention_bytes`.
struct AttentionScratch {
  uint8_t* keys;    // [16 panels][head_dim][16] in the level's form
  uint8_t* values;  // [head_dim / 16 panels][256][16], `value_bytes` apart
  float* queries;   // [rows][head_dim] floats, bfloat16 or words
  float* steps;     // [rows] of words: what they count
  float* totals;    // [rows][head_dim]
  float* highest;   // [rows]
  float* sums;      // [rows]
  float *key_scales, *value_scales;  // [256] of codes; keys' include kKeyUnit
};
static inline size_t attention_bytes(int group, int head_dim) {
  const size_t rows = size_t(tile_queries(group)) * group + kSpareRows;
  return size_t(kPartition) * head_dim * 4 + value_bytes<KvType::f32>() * (head_dim / 16) + 2 * rows * head_dim * 4 + 3 * rows * 4 + 2 * kPartition * 4 + 1024;
}
static inline AttentionScratch carve(uint8_t* at, int group, int head_dim) {
  const size_t rows = size_t(tile_queries(group)) * group + kSpareRows;
  AttentionScratch s;
  s.keys = at;
  s.values = at + size_t(kPartition) * head_dim * 4;
  s.queries = (float*)(s.values + value_bytes<KvType::f32>() * (head_dim / 16));
  s.totals = s.queries + rows * head_dim;
  s.highest = s.totals + rows * head_dim;
  s.sums = s.highest + rows;
  s.steps = s.sums + rows;
  s.key_scales = s.steps + rows;
  s.value_scales = s.key_scales + kPartition;
  return s;
}

// Far below every score beyond lane n: load from kBeyond + 16 - n. Finite, so that no step on the way to 0 is NaN.
constexpr float kFar = -1e30f;
alignas(64) static const float kBeyond[32] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                              kFar, kFar, kFar, kFar,
                                              kFar, kFar, kFar, kFar,
                                              kFar, kFar, kFar, kFar,
                                              kFar, kFar, kFar, kFar};

// out [R][panels * 16] = x [R][depth] times panels, in the level's form; strides of x and out in values, of panels in bytes.
template <KvType K, int R>
static inline void multiply(const void* x, int x_stride, const uint8_t* w, size_t w_stride, int panels, int depth, float* out, int out_stride) {
  for (int p = 0; p < panels;) {
    const int columns = widest_of(panels - p);
    with_width(columns, [&](auto width) {
      constexpr int C = decltype(width)::value;
      if constexpr (packing_of(K) == Packing::words) {
        tile_whole<R, C>((const int16_t*)x, x_stride, w + p * w_stride, w_stride, depth / 2, out + p * 16, out_stride);
      } else if constexpr (packing_of(K) == Packing::pairs) {
#if KVFERRY_PAIRS
        tile_pairs<R, C>((const uint16_t*)x, x_stride, w + p * w_stride, w_stride, depth / 2, out + p * 16, out_stride);
#endif
      } else {
        tile_wide<R, C>((const float*)x, x_stride, (const float*)(w + p * w_stride), w_stride / 4, depth, out + p * 16, out_stride);
      }
    });
    p += columns;
  }
}

#if KVFERRY_AMX
// The same for rows of pairs, 16 of them or as many as the unit was set up for, on the matrix unit.
static inline void multiply_on_unit(const uint16_t* x, int x_stride, const uint8_t* w, size_t w_stride, int panels, int depth, float* out, int out_stride) {
  for (int p = 0, columns; p < panels; p += columns) {
    const auto run = [&](auto count) {
      constexpr int C = decltype(count)::value;
      unit_pairs<1, C, false>(x, size_t(x_stride), w + size_t(p) * w_stride, w_stride, depth, out + p * 16, out_stride);
      columns = C;
    };
    const int left = panels - p;
    left >= 4 ? run(Count<4>{}) : left >= 2 ? run(Count<2>{}) : run(Count<1>{});
  }
}
#endif

// Whether the matrix unit computes: it takes 32 values of a head at a time.
template <KvType K>
static inline bool is_on_unit(int head_dim) {
  return KVFERRY_AMX && packing_of(K) == Packing::pairs && head_dim % 32 == 0;
}

// Scores of one row, of which it sees `seen`, to weights of `panels` times 16 tokens, floats in their place; `step` is what
// the query's words count, if it has them. What the products of these weights count is the result. Words are rounded by the
// largest weight times its scale: by the largest scale, a token that hardly weighs would cost all others their bits.
template <KvType K>
static inline float weigh(const AttentionScratch& s, float* scores, uint16_t* narrow, int seen, int panels, float scale, float step, float& highest, float& sum) {
  constexpr Packing packing = packing_of(K);
  constexpr bool is_coded = K == KvType::int8;
  const int full = seen / 16, used = (seen + 15) / 16;
  if constexpr (is_coded)
    for (int p = 0; p < used; ++p)
      v_store(scores + p * 16, v_mul(v_load(scores + p * 16), v_mul(v_load(s.key_scales + p * 16), v_set(step))));
  if (used > full) v_store(scores + full * 16, v_add(v_load(scores + full * 16), v_load(kBeyond + 16 - (seen - full * 16))));
  V top = v_load(scores);
  for (int p = 1; p < used; ++p) top = v_max(top, v_load(scores + p * 16));
  const float most = v_highest(top);
  highest = most * scale;
  V all = v_zero();
  constexpr bool is_rough = KVFERRY_PAIRS && packing != Packing::floats;
  const float in_octaves = scale * kLog2E;
  const V by = v_set(is_rough ? in_octaves : scale), least = v_set(is_rough ? -most * in_octaves : -highest);
  const auto weight = [&](int at) {
    V x = v_fma(v_load(scores + at * 16), by, least);
    if constexpr (is_rough) {
#if KVFERRY_PAIRS
      x = v_exp2_rough(x);
#endif
    } else {
      x = v_exp(x);
    }
    all = v_add(all, x);
    return is_coded ? v_mul(x, v_load(s.value_scales + at * 16)) : x;
  };
  const auto put = [&](int at, V x) {
    if constexpr (packing == Packing::pairs) {
      v_store_bf16(narrow + at * 16, x);
    } else {
      v_store(scores + at * 16, x);
    }
  };
  int p = 0;
#if KVFERRY_PAIRS
  if constexpr (packing == Packing::pairs)
    for (; p + 2 <= used; p += 2) {
      const V first = weight(p), second = weight(p + 1);
      p_store_bf16(narrow + p * 16, first, second);
    }
#endif
  for (; p < used; ++p) put(p, weight(p));
  for (; p < panels; ++p) put(p, v_zero());
  sum = v_sum(all);
  if constexpr (packing != Packing::words) return 1.0f;
  float inverse;
  const float counts = rounding_step(scores, panels * 16, kMostWord, inverse);
  for (p = 0; p < panels; ++p) v_store_words((int16_t*)narrow + p * 16, v_round(v_mul(v_load(scores + p * 16), v_set(inverse))));
  return counts;
}

// R rows of one partition whose keys and values are packed: their weights and what these weigh, merged into `totals`.
// `OnUnit`: on the matrix unit, and R is what fits; else there are R rows.
template <KvType K, int R, bool OnUnit = false>
static inline void attend_rows(const AttentionGeometry& g, const AttentionScratch& s, int row, int first_position, int start, int count = R) {
  const int rows = OnUnit ? count : R;
  alignas(64) float scores[R * kPartition];
  alignas(64) uint16_t narrow[R * kPartition];
  alignas(64) float weighed[R * kMaxHeadDim];
  const int D = g.head_dim;
  // Rows are query by query, the heads of a group side by side.
  const auto seen_by = [&](int r) {
    const int seen = first_position + (row + r) / g.group + 1 - start;
    return seen < 0 ? 0 : seen < kPartition ? seen : kPartition;
  };
  const int most = seen_by(rows - 1);
  if (most == 0) return;
  const int panels = (most + 15) / 16;
  const uint8_t* queries = (const uint8_t*)s.queries + size_t(row) * D * kPackedBytes<K>;
  if constexpr (OnUnit) {
#if KVFERRY_AMX
    multiply_on_unit((const uint16_t*)queries, D, s.keys, key_bytes<K>(D), panels, D, scores, kPartition);
#endif
  } else {
    multiply<K, R>(queries, D, s.keys, key_bytes<K>(D), panels, D, scores, kPartition);
  }
  const int weighed_panels = OnUnit ? (panels + 1) / 2 * 2 : panels;
  Softmax before, here;
  float counts[R];
  for (int r = 0; r < rows; ++r) {
    before.highest[r] = s.highest[row + r];
    before.sums[r] = s.sums[row + r];
    counts[r] = weigh<K>(s, scores + r * kPartition, narrow + r * kPartition, seen_by(r), weighed_panels, g.scale, s.steps[row + r], here.highest[r], here.sums[r]);
  }
  if constexpr (OnUnit) {
#if KVFERRY_AMX
    multiply_on_unit(narrow, kPartition, s.values, value_bytes<K>(), D / 16, weighed_panels * 16, weighed, kMaxHeadDim);
#endif
  } else {
    multiply<K, R>(packing_of(K) == Packing::floats ? (const void*)scores : narrow, kPartition, s.values, value_bytes<K>(), D / 16, panels * 16, weighed, kMaxHeadDim);
  }
  if constexpr (packing_of(K) == Packing::words)  // before they are merged, so that it is rounded alike wherever that happens
    for (int r = 0; r < rows; ++r)
      for (int d = 0; d < D; d += 16) v_store(weighed + r * kMaxHeadDim + d, v_mul(v_load(weighed + r * kMaxHeadDim + d), v_set(counts[r])));
  alignas(64) float keep[16], take[16];
  merge_sums(before, here, keep, take);
  for (int r = 0; r < rows; ++r) {
    if (seen_by(r) == 0) continue;
    merge_values(s.totals + size_t(row + r) * D, weighed + r * kMaxHeadDim, keep[r], take[r], D);
    s.highest[row + r] = before.highest[r];
    s.sums[row + r] = before.sums[r];
  }
}

// One query in the form that its keys are multiplied in; what its words count, if it has them.
template <KvType K>
static inline float put_query(uint8_t* to, const float* from, int n) {
  constexpr Packing packing = packing_of(K);
  float inverse = 1.0f, step = 1.0f;
  if constexpr (packing == Packing::words) step = rounding_step(from, n, kMostWord, inverse);
  for (int d = 0; d < n; d += 16) {
    const V v = v_load(from + d);
    if constexpr (packing == Packing::floats) v_store((float*)to + d, v);
    if constexpr (packing == Packing::pairs) v_store_bf16((uint16_t*)to + d, v);
    if constexpr (packing == Packing::words) v_store_quads((int16_t*)to + d, v_round(v_mul(v, v_set(inverse))));
  }
  return step;
}

// One KV head of an item: its rows' totals in the scratch, not yet divided by their sums. `sharers`: its sequences, null
// where it has one. `next` is what the thread will probably turn to afterwards, so that its first keys are on their way.
template <KvType K>
static void attend(const Batch& batch, const AttentionGeometry& g, const AttentionItem& item, const int* sharers, int kv_head, const AttentionItem* next, const float* queries, int query_stride, const AttentionScratch& s) {
  const Sequence& sequence = batch.sequences[item.sequence];
  const int D = g.head_dim, rows = item.queries * g.group;
  // Who shares a partition sees all of it: as if the queries stood right behind it.
  const int first_position = sharers ? item.end * kPartition : sequence.context - sequence.queries + item.first_query;
  for (int q = 0; q < item.queries; ++q)
    for (int h = 0; h < g.group; ++h) {
      const int at = sharers ? batch.sequences[sharers[q]].first : sequence.first + item.first_query + q;
      const float* from = queries + size_t(at) * query_stride + size_t(kv_head * g.group + h) * D;
      const int row = q * g.group + h;
      s.steps[row] = put_query<K>((uint8_t*)s.queries + size_t(row) * D * kPackedBytes<K>, from, D);
      for (int d = 0; d < D; d += 16) v_store(s.totals + size_t(row) * D + d, v_zero());
      s.highest[row] = -__builtin_inff();
      s.sums[row] = 0.0f;
    }
  const int last = sharers ? first_position : first_position + item.queries;  // tokens that the last row sees
  const int packed = last < item.end * kPartition ? last : item.end * kPartition, behind = (packed + 15) / 16 * 16;
  // What is packed kUnitsAhead after the one at t: of this head, of the next, or of the next item.
  const auto ahead_of = [&](int t) -> Key {
    const int then = t + 16 * kUnitsAhead, further = then - behind;
    if (further < 0) return key_at<K>(batch, g, sequence, kv_head, then);
    const int own = item.begin * kPartition + further;
    if (kv_head + 1 < item.kv_end) return own < packed ? key_at<K>(batch, g, sequence, kv_head + 1, own) : Key{};
    if (!next) return {};
    const Sequence& other = batch.sequences[next->sequence];
    const int token = next->begin * kPartition + further;
    return token < other.context ? key_at<K>(batch, g, other, next->kv_begin, token) : Key{};
  };
  UnitCopy copy;
  for (int part = item.begin; part < item.end; ++part) {
    const int start = part * kPartition, end = last < start + kPartition ? last : start + kPartition;
    for (int t = start; t < end; t += 16) {
      const int p = (t - start) / 16;
      const Unit unit = unit_at<K>(batch, g, sequence, kv_head, t, end, copy);
      const Key ahead = ahead_of(t);
      pack_keys<K>(g, unit.keys, ahead.row ? ahead.row : unit.keys, s.keys + p * key_bytes<K>(D));
      pack_values<K>(g, unit.values, ahead.row ? ahead.row + half_bytes<K>(g) : unit.values, s.values + size_t(p) * 16 * 16 * kPackedBytes<K>, value_bytes<K>());
      if constexpr (K == KvType::int8) {
        if (ahead.scale) {
          fetch_row(ahead.scale, 1);
          fetch_row(ahead.scale + half_bytes<K>(g), 1);
        }
        v_store(s.key_scales + p * 16, v_mul(v_load((const float*)unit.key_scales), v_set(1.0f / kKeyUnit<K>)));
        v_store(s.value_scales + p * 16, v_load((const float*)unit.value_scales));
      }
    }
#if KVFERRY_AMX
    if (is_on_unit<K>(D)) {
      // It takes 32 tokens at a time: behind an odd number of sixteens, zeros.
      const int sixteens = (end - start + 15) / 16;
      for (int d = 0; sixteens % 2 && d < D / 16; ++d) std::memset(s.values + d * value_bytes<K>() + size_t(sixteens) * 16 * 32, 0, 16 * 32);
      const Tiles tiles(rows < kTileTall ? rows : kTileTall, kTileBytes);
      for (int row = 0; row < rows; row += kTileTall)
        attend_rows<K, kTileTall, true>(g, s, row, first_position, start, rows - row < kTileTall ? rows - row : kTileTall);
      continue;
    }
#endif
    const int step = even_rows(rows, kTileRows);
    for (int row = 0; row < rows; row += step) {
      const int count = rows - row < step ? rows - row : step;
      with_count<kTileRows>(count, [&](auto number) { attend_rows<K, decltype(number)::value>(g, s, row, first_position, start); });
    }
  }
}
