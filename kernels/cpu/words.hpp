// Matrices of codes where no pairs are multiplied, inputs rounded to 16 bits (exact): out = sum over blocks of
//
//   scale * step * (q0 c0 + q1 c1 + ...) + minimum * step * (q0 + q1 + ...)
//
// with whole numbers inside the brackets: exact, in any order. Groups of 32 inputs share a step, the largest magnitude /
// 32767: 128 times finer than bfloat16 for that input, and with AVX2 two products where floats make one. Where that is not
// fine enough, because small inputs stand beside large ones (KV in float32), what a word leaves is a second word, its rest:
// together they have more bits than a float.
// Few rows unpack codes in registers; more of them read a panel that was unpacked into scratch once. Many rows whose
// inputs are rounded to 8 bits (fast) come here as well: the same whole numbers, and a panel's bytes in no better order.
// Included once per level, after bytes.hpp.

#if !KVFERRY_PAIRS
constexpr int kWordRows = 4;

// Bytes of one unpacked block: its codes as words, then 16 scales and 16 minima as floats.
static inline constexpr size_t unpacked_block(int block) { return size_t(block) * kPanel * 2 + 2 * kPanel * 4; }

template <class Form>
static inline void unpack_words(const Matrix& m, int panel, uint8_t* to) {
  const uint8_t* at = m.data + size_t(panel) * m.panel_bytes;
  for (int b = 0, blocks = m.depth / Form::block; b < blocks; ++b, at += m.block_bytes(), to += unpacked_block(Form::block)) {
    int16_t* codes = (int16_t*)to;
    if constexpr (Form::format == Format::codes4) {
      for (int g = 0; g < Form::block / 8; ++g) {
        const W packed = w_load((const int16_t*)(at + g * 64));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) w_store(codes + (g * 4 + i) * 2 * kPanel, w_code4(packed, i));
      }
    } else {
      for (int i = 0; i < Form::block / 2; ++i) w_store(codes + i * 2 * kPanel, w_codes8((const int8_t*)at + i * 32));
    }
    V scale, minimum;
    load_scales(m, at + m.code_bytes(), scale, minimum);
    float* scales = (float*)(codes + Form::block * kPanel);
    v_store(scales, scale);
    v_store(scales + kPanel, minimum);
  }
}

// R rows times one panel, packed or as `unpack_words` left it.
template <class Form, int R, bool IsPacked, bool HasRests>
static inline void tile_words(const Matrix& m, const uint8_t* at, const Rows& x, float* out) {
  constexpr int block = Form::block;
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const size_t groups = size_t(x.stride / kGroup);
  V total[R][1];
  clear(total);
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    const int16_t* words = x.words + size_t(b) * block;
    [[maybe_unused]] const int16_t* rests = HasRests ? x.rests + size_t(b) * block : nullptr;
    I sum[R][1];
    [[maybe_unused]] I rest[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r][0] = i_zero();
      if constexpr (HasRests) rest[r] = i_zero();
    }
    const auto add = [&](W codes, int pair) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const size_t at = size_t(r) * x.stride + 2 * pair;
        sum[r][0] = i_add(sum[r][0], codes, inputs_at(words + at));
        if constexpr (HasRests) rest[r] = i_add(rest[r], codes, inputs_at(rests + at));
      }
    };
    V scale, minimum;
    if constexpr (!IsPacked) {
      const int16_t* codes = (const int16_t*)at;
#pragma GCC unroll 1
      for (int i = 0; i < block / 2; ++i) add(w_load(codes + i * 2 * kPanel), i);
      scale = v_load((const float*)(codes + block * kPanel));
      minimum = v_load((const float*)(codes + block * kPanel) + kPanel);
      at += unpacked_block(block);
    } else {
      if constexpr (Form::format == Format::codes4) {
#pragma GCC unroll 1
        for (int g = 0; g < block / 8; ++g) {
          fetch(at + g * 64 + kAhead);
          const W packed = w_load((const int16_t*)(at + g * 64));
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) add(w_code4(packed, i), g * 4 + i);
        }
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < block / 2; ++i) {
          if (i % 2 == 0) fetch(at + i * 32 + kAhead);
          add(w_codes8((const int8_t*)at + i * 32), i);
        }
      }
      load_scales(m, at + m.code_bytes(), scale, minimum);
      at += m.block_bytes();
    }
    const float* steps = x.steps + b * block / kGroup;
    add_column(total, sum, 0, scale, minimum, has_min, inputs.sums + b, inputs.stride, [&](const I& whole, int r) {
      V value = i_float(whole);
      if constexpr (HasRests) value = v_fma(i_float(rest[r]), v_set(1.0f / kRests), value);
      return v_mul(value, v_set(steps[r * groups]));
    });
  }
  store(total, out);
}

// Panels [panel, panel + panels) for any number of rows; `scratch` and `put` as in `product`.
template <class Put>
static void product_of_words(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch, Put&& put) {
  alignas(64) float out[kWordRows * kPanel];
  const int step = even_rows(rows, kWordRows);
  with_codes(m, [&](auto form) {
    using Form = decltype(form);
    for (int p = panel; p < panel + panels; ++p) {
      const bool is_packed = rows <= kWordRows;
      if (!is_packed) unpack_words<Form>(m, p, scratch);
      for (int row = 0; row < rows; row += step) {
        const Rows at = x.from(row);
        with_count<kWordRows>(rows - row < step ? rows - row : step, [&](auto count) {
          constexpr int R = decltype(count)::value;
          const uint8_t* data = is_packed ? m.data + size_t(p) * m.panel_bytes : scratch;
          if (x.forms.rests) {
            is_packed ? tile_words<Form, R, true, true>(m, data, at, out) : tile_words<Form, R, false, true>(m, data, at, out);
          } else {
            is_packed ? tile_words<Form, R, true, false>(m, data, at, out) : tile_words<Form, R, false, false>(m, data, at, out);
          }
          put(Tile{row, R, p, 1, out});
        });
      }
    }
  });
}
#endif
