// Matrices of codes, inputs rounded to 8 bits (fast): out = sum over blocks of
//
//   scale * step * (q0 c0 + q1 c1 + ...) + minimum * step * (q0 + q1 + ...)
//
// with whole numbers inside the brackets: exact, in any order, the same on every level. Groups of 32 inputs share a
// step, the largest magnitude / 127 (the scheme of ggml's Q8_0 and Q8_1; Dettmers et al., LLM.int8(), 2022, section 2).
// Codes are unpacked in registers: that costs three operations for 64 bytes of a panel. Where no pairs are multiplied, more
// than kByteRows rows are the business of words.hpp.
// Included once per level, after codes.hpp.

#if KVFERRY_PAIRS
constexpr int kByteRows = 6;
#else
constexpr int kByteRows = 3;
#endif

// Inputs [32 group, +32) of a row rounded to bytes or, without these, to words (and rests), from its floats.
static inline void write_whole(const Rows& rows, int row, int group) {
  const size_t at = size_t(row) * rows.stride + size_t(group) * kGroup;
  const V a = v_load(rows.wide + at), b = v_load(rows.wide + at + 16);
  const float most = rows.forms.bytes ? 127.0f : 32767.0f;
  const float top = v_highest(v_max(v_max(a, v_sub(v_zero(), a)), v_max(b, v_sub(v_zero(), b))));
  // What is so small has no inverse, and counts as nothing. The last term is NaN once an input is not finite.
  const float inverse = top > 1e-30f ? most / top : 0.0f;
  const float step = top / most + 0.0f * (v_sum(a) + v_sum(b));
  rows.steps[at / kGroup] = step;
  float whole_sum = 0.0f;
  for (int half = 0; half < 2; ++half) {
    const V scaled = v_mul(half ? b : a, v_set(inverse));
    const V whole = v_round(v_max(v_min(scaled, v_set(most)), v_set(-most)));  // NaN becomes a number here
    float sum = v_sum(whole);
    if (rows.forms.bytes) {
      v_store_bytes(rows.bytes + at + 16 * half, whole);
      rows.byte_sums[at / kSumWidth + half] = int32_t(sum);
    }
#if !KVFERRY_PAIRS
    v_store_words(rows.words + at + 16 * half, whole);
    if (rows.forms.rests) {
      const V rest = v_round(v_max(v_min(v_mul(v_sub(scaled, whole), v_set(kRests)), v_set(most)), v_set(-most)));
      v_store_words(rows.rests + at + 16 * half, rest);
      sum += v_sum(rest) / kRests;
    }
#endif
    rows.half_sums[at / kSumWidth + half] = step * sum;
    whole_sum += sum;
  }
  rows.group_sums[at / kGroup] = step * whole_sum;
}

// R rows times C panels from `panel` on.
template <class Form, int R, int C>
static inline void tile_bytes(const Matrix& m, int panel, const Rows& x, float* out) {
  constexpr int block = Form::block;
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const size_t halves = size_t(x.stride / kSumWidth), groups = size_t(x.stride / kGroup);
  V total[R][C];
  clear(total);
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    S sum[R][C];
    const int8_t* bytes = x.bytes + size_t(b) * block;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int32_t* sums = x.byte_sums + r * halves + b * Form::halves;
      const S start = Form::format == Format::codes4 ? s_zero() : s_start8(Form::halves == 2 ? sums[0] + sums[1] : sums[0]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = start;
    }
    if constexpr (Form::format == Format::codes4) {
#pragma GCC unroll 4
      for (int g = 0; g < block / 8; ++g)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          B low, high;
          b_codes4(at[c] + g * 64, low, high);
          if constexpr (R <= kFusedRows) fetch(at[c] + g * 64 + kAhead);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r][c] = s_add4(sum[r][c], low, inputs_at(bytes + size_t(r) * x.stride + g * 8));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r][c] = s_add4(sum[r][c], high, inputs_at(bytes + size_t(r) * x.stride + g * 8 + 4));
        }
    } else {
#pragma GCC unroll 8
      for (int g = 0; g < block / 4; ++g)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          const B codes = b_codes8(at[c] + g * 64);
          if constexpr (R <= kFusedRows) fetch(at[c] + g * 64 + kAhead);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r][c] = s_add8(sum[r][c], codes, inputs_at(bytes + size_t(r) * x.stride + g * 4));
        }
    }
    const float* steps = x.steps + b * block / kGroup;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V scale, minimum;
      load_scales(m, at[c] + m.code_bytes(), scale, minimum);
      add_column(total, sum, c, scale, minimum, has_min, inputs.sums + b, inputs.stride, [&](const S& whole, int r) {
        return v_mul(Form::format == Format::codes4 ? s_float4(whole) : s_float8(whole), v_set(steps[r * groups]));
      });
      at[c] += m.block_bytes();
    }
  }
  store(total, out);
}

// Panels [panel, panel + panels) for any number of rows; `put` as in `product`.
template <class Put>
static void product_of_bytes(const Matrix& m, const Rows& x, int rows, int panel, int panels, Put&& put) {
  alignas(64) float out[kByteRows * 2 * kPanel];
  const int step = even_rows(rows, kByteRows);
  for (int p = 0; p < panels;) {
    // One row is read from memory, and one stream of it faster than several.
    const int columns = KVFERRY_PAIRS && rows > 1 && panels - p >= 2 ? 2 : 1;
    for (int row = 0; row < rows; row += step) {
      const Rows at = x.from(row);
      with_count<kByteRows>(rows - row < step ? rows - row : step, [&](auto count) {
        constexpr int R = decltype(count)::value;
        const auto run = [&](auto width) {
          constexpr int C = decltype(width)::value;
          with_codes(m, [&](auto form) { tile_bytes<decltype(form), R, C>(m, panel + p, at, out); });
          put(Tile{row, R, panel + p, C, out});
        };
        if constexpr (KVFERRY_PAIRS)
          if (columns == 2) return run(Count<2>{});
        run(Count<1>{});
      });
    }
    p += columns;
  }
}
