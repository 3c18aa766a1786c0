// Tiles of Intel's matrix unit (AMX): 16 rows of inputs, 64 bytes each, times as many inputs of 16 outputs.
//
// A packed panel is what the unit multiplies with: 16 outputs side by side, pairs of bfloat16 or quads of bytes below
// each other (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and TDPBSSD). A row's
// sums depend on that row alone and go through its inputs 32 at a time, so they are the same in any tile; denormals
// count as zero and sums round to nearest even, whatever the thread's settings.
// Included once per level, after words.hpp.

#if KVFERRY_AMX
constexpr int kTileTall = 16;   // rows of a tile
constexpr int kTileBytes = 64;  // of a tile's row

// What the tiles are for: sums 0 to 3, inputs 4 and 5, weights 6 and 7. Written as text for the assembler, because the
// compiler's own functions want flags and say nothing of the memory that they read.
template <int Tile>
[[gnu::always_inline]] static inline void t_load(const void* p, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
// The same for what is not read again soon: it leaves its place in the first cache to the weights.
template <int Tile>
[[gnu::always_inline]] static inline void t_load_once(const void* p, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
[[gnu::always_inline]] static inline void t_store(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
[[gnu::always_inline]] static inline void t_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
// Sums of products of pairs of bfloat16.
template <int Sum, int Inputs, int Weights>
[[gnu::always_inline]] static inline void t_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Inputs), "i"(Weights));
}
// Whole sums of products of quads of bytes.
template <int Sum, int Inputs, int Weights>
[[gnu::always_inline]] static inline void t_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Inputs), "i"(Weights));
}

// The unit in use by this thread, for so many rows of inputs and so many bytes of each; free again at the end, so that
// nobody saves eight KB of tiles with every change of threads.
class Tiles {
 public:
  Tiles(int rows, int bytes) {
    struct [[gnu::packed]] {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : kTileBytes);
      shape.rows[tile] = uint8_t(tile < 6 ? rows : bytes / 4);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Where a tile of `tall` rows begins that ends, at most, with the last of `rows`. What it computes anew is left out.
static inline int tile_begin(int row, int rows, int tall) { return row + tall <= rows ? row : rows > tall ? rows - tall : 0; }

// Loads the inputs of a row of tiles, where none is loaded yet, and multiplies one panel with it.
template <int A, int C, int Row, int Column, bool Streams>
[[gnu::always_inline]] static inline void unit_step(const uint16_t* x, size_t x_bytes, const uint8_t* w) {
  if constexpr (Column == 0) t_load_once<4 + Row>(x, x_bytes);
  if constexpr (Row == 0) {
    t_load<6 + Column % 2>(w, kTileBytes);
    if constexpr (Streams)
      for (int line = 0; line < 16; ++line) fetch(w + line * 64 + kAhead);
  }
  t_pairs<Row * C + Column, 4 + Row, 6 + Column % 2>();
}

// out [16 A][16 C], `out_stride` floats apart = 16 A rows of x times C panels of pairs, `depth` inputs of each.
// `Streams`: few rows go through panels that come from memory. Else, with each 32 inputs, `lines` lines are asked for of
// what stands at `ahead`.
template <int A, int C, bool Streams>
static inline void unit_pairs(const uint16_t* x, size_t x_stride, const uint8_t* w, size_t w_stride, int depth, float* out, int out_stride, const uint8_t* ahead = nullptr, int lines = 0) {
  static_assert(A * C <= 4 && (A == 1 || C <= 2));
  t_zero<0>();
  if constexpr (A * C > 1) t_zero<1>();
  if constexpr (A * C > 2) t_zero<2>(), t_zero<3>();
  const size_t x_bytes = x_stride * 2;
  const uint16_t* below = x + kTileTall * x_stride;
  for (int i = 0; i < depth; i += 32, w += 1024) {
    if constexpr (!Streams)
      for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    unit_step<A, C, 0, 0, Streams>(x + i, x_bytes, w);
    if constexpr (C > 1) unit_step<A, C, 0, 1, Streams>(x + i, x_bytes, w + w_stride);
    if constexpr (C > 2) unit_step<A, C, 0, 2, Streams>(x + i, x_bytes, w + 2 * w_stride);
    if constexpr (C > 2) unit_step<A, C, 0, 3, Streams>(x + i, x_bytes, w + 3 * w_stride);
    if constexpr (A > 1) unit_step<A, C, 1, 0, Streams>(below + i, x_bytes, w);
    if constexpr (A > 1 && C > 1) unit_step<A, C, 1, 1, Streams>(below + i, x_bytes, w + w_stride);
  }
  const size_t out_bytes = size_t(out_stride) * 4;
  t_store<0>(out, out_bytes);
  if constexpr (C > 1) t_store<1>(out + kPanel, out_bytes);
  if constexpr (C > 2) t_store<2>(out + 2 * kPanel, out_bytes), t_store<3>(out + 3 * kPanel, out_bytes);
  if constexpr (A > 1) t_store<C>(out + size_t(kTileTall) * out_stride, out_bytes);
  if constexpr (A > 1 && C > 1) t_store<C + 1>(out + size_t(kTileTall) * out_stride + kPanel, out_bytes);
}

// Matrices of pairs; `put` as in `product`.
template <class Put>
static void unit_product_of_pairs(const Matrix& m, const Rows& x, int rows, int panel, int panels, Put&& put) {
  alignas(64) float outs[2][4 * kTileTall * kPanel];
  const int tall = rows < kTileTall ? rows : kTileTall;
  const Tiles tiles(tall, kTileBytes);
  Tile last;  // given once the next one is under way: whoever reads at once what the unit stores waits for it
  int turn = 0;
  for (int p = 0, columns; p < panels; p += columns) {
    const uint8_t* w = m.data + size_t(panel + p) * m.panel_bytes;
    columns = rows <= kTileTall && panels - p >= 4 ? 4 : panels - p >= 2 ? 2 : 1;
    for (int row = 0, done; row < rows; row += done) {
      const bool two = rows >= 2 * kTileTall && rows - row > kTileTall && columns < 4;
      const int begin = tile_begin(row, rows, two ? 2 * kTileTall : tall);
      const uint16_t* inputs = x.narrow + size_t(begin) * x.stride;
      float* out = outs[turn ^= 1];
      // The next panels, while the rows go through these.
      const int lines = (columns * 16 * 2 * kTileTall + rows - 1) / rows;
      const uint8_t* ahead = w + columns * m.panel_bytes + size_t(row) / (2 * kTileTall) * lines * (m.depth * 2);
      const auto run = [&](auto a, auto c) {
        unit_pairs<decltype(a)::value, decltype(c)::value, false>(inputs, size_t(x.stride), w, m.panel_bytes, m.depth, out, columns * kPanel, ahead, lines);
      };
      if (rows <= kTileTall) {
        const auto stream = [&](auto c) {
          unit_pairs<1, decltype(c)::value, true>(inputs, size_t(x.stride), w, m.panel_bytes, m.depth, out, columns * kPanel);
        };
        columns == 4 ? stream(Count<4>{}) : columns == 2 ? stream(Count<2>{}) : stream(Count<1>{});
      } else if (columns == 2) {
        two ? run(Count<2>{}, Count<2>{}) : run(Count<1>{}, Count<2>{});
      } else {
        two ? run(Count<2>{}, Count<1>{}) : run(Count<1>{}, Count<1>{});
      }
      if (last.rows) put(last);
      done = begin + (two ? 2 * kTileTall : tall) - row;
      last = {row, done, panel + p, columns, out + size_t(row - begin) * columns * kPanel};
    }
  }
  put(last);
}

// One block of packed codes to what the unit multiplies: pairs of bfloat16, whole numbers all of them, 4-bit ones raised,
// which the minimum takes back; or quads of bytes.
template <class Form, bool Bytes>
[[gnu::always_inline]] static inline void unpack_block(const uint8_t* at, uint8_t* to) {
  constexpr bool four = Form::format == Format::codes4;
  fetch(at + Form::block * (four ? 8 : 16) + kAhead);  // scales
#pragma GCC unroll 8
  for (int g = 0; g < Form::block / (four ? 8 : 4); ++g) {
    fetch(at + g * 64 + kAhead);
    if constexpr (four && Bytes) {
      B low, high;
      b_codes4(at + g * 64, low, high);
      b_store(to + g * 128, low);
      b_store(to + g * 128 + 64, high);
    } else if constexpr (four) {
      const P words = p_load(at + g * 64);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) p_store(to + (g * 4 + i) * 64, p_raised4(words, i));
    } else if constexpr (Bytes) {
      b_store(to + g * 64, {quads8(at + g * 64)});
    } else {
      p_store(to + g * 128, p_codes8((const int8_t*)at + g * 64));
      p_store(to + g * 128 + 64, p_codes8((const int8_t*)at + g * 64 + 32));
    }
  }
}

// out [R][16], `out_stride` floats apart = R rows of x times one panel of codes, as in codes.hpp or, if `Bytes`, bytes.hpp.
// A block's sums leave the unit, so that its scales can be applied, but not at once: a block is stored two later, when it
// is done, and read again two later still, because whoever waits for the unit begins nothing else. `unpacked`: the panel
// as the unit takes it, which the first rows make for all.
template <class Form, bool Bytes, int R>
[[gnu::noinline]] static void unit_codes(const Matrix& m, int panel, const Rows& x, uint8_t* unpacked, bool is_first, float* out, int out_stride) {
  constexpr int block = Form::block, kStore = 2, kLag = 4, kRing = 4;
  constexpr size_t unit_bytes = Bytes ? 1 : 2, step = block * 16 * unit_bytes;
  alignas(64) float sums[kRing][kTileTall * kPanel];
  constexpr bool raised = !Bytes && Form::format == Format::codes4;
  const bool has_min = adds_minimum(m) || raised;
  const BlockSums input_sums = block_sums<block>(x);
  const int blocks = m.depth / block;
  const size_t block_bytes = size_t(m.block_bytes()), code_bytes = size_t(m.code_bytes()), stride = size_t(x.stride) * unit_bytes;
  const size_t groups = size_t(x.stride / kGroup);
  const uint8_t* const codes = m.data + size_t(panel) * m.panel_bytes;
  const uint8_t* inputs = Bytes ? (const uint8_t*)x.bytes : (const uint8_t*)x.narrow;
  if (is_first)
    for (int b = 0; b < kLag && b < blocks; ++b) unpack_block<Form, Bytes>(codes + b * block_bytes, unpacked + b * step);
  V total[R][1];
  clear(total);
  const auto unit = [&](auto number, int b) __attribute__((always_inline)) {
    constexpr int tile = decltype(number)::value;
    if (b < blocks) {
      t_zero<tile>();
      t_load_once<4 + tile % 2>(inputs + size_t(b) * block * unit_bytes, stride);
      t_load<6 + tile % 2>(unpacked + b * step, kTileBytes);
      if constexpr (Bytes) {
        t_bytes<tile, 4 + tile % 2, 6 + tile % 2>();
      } else {
        t_pairs<tile, 4 + tile % 2, 6 + tile % 2>();
      }
      if (is_first && b + kLag < blocks) unpack_block<Form, Bytes>(codes + (b + kLag) * block_bytes, unpacked + (b + kLag) * step);
    }
    if (b >= kStore && b < blocks + kStore) t_store<(tile + kStore) % 4>(sums[(b - kStore) % kRing], kTileBytes);
    if (b >= kLag && b < blocks + kLag) {
      const int done = b - kLag;
      const float* from = sums[done % kRing];
      const float* steps = Bytes ? x.steps + size_t(done) * block / kGroup : nullptr;
      V scale, minimum, sum[R][1];
      load_scales(m, codes + done * block_bytes + code_bytes, scale, minimum);
      if (raised) minimum = v_fma(scale, v_set(-kRaised), minimum);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][0] = Bytes ? v_mul(s_float4(s_load(from + r * kPanel)), v_set(steps[r * groups])) : v_load(from + r * kPanel);
      add_column(total, sum, 0, scale, minimum, has_min, input_sums.sums + done, input_sums.stride, as_it_is);
    }
  };
  for (int b = 0; b < blocks + kLag; b += 4) {
    unit(Count<0>{}, b);
    unit(Count<1>{}, b + 1);
    unit(Count<2>{}, b + 2);
    unit(Count<3>{}, b + 3);
  }
  store(total, out, out_stride);
}

// Matrices of codes, inputs as they are or rounded to 8 bits; `put` as in `product`.
template <bool Bytes, class Put>
static void unit_product_of_codes(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch, Put&& put) {
  alignas(64) float out[kTileTall * 2 * kPanel];
  const int tall = rows < kTileTall ? rows : kTileTall;
  with_codes(m, [&](auto form) {
    using Form = decltype(form);
    const Tiles tiles(tall, Form::block * (Bytes ? 1 : 2));
    for (int p = 0, columns; p < panels; p += columns) {
      columns = panels - p >= 2 ? 2 : 1;
      for (int row = 0, done; row < rows; row += done) {
        const int begin = tile_begin(row, rows, tall);
        const Rows inputs = x.from(begin);
        with_count<kTileTall>(tall, [&](auto count) {
          for (int c = 0; c < columns; ++c)
            unit_codes<Form, Bytes, decltype(count)::value>(m, panel + p + c, inputs, scratch + size_t(c) * m.depth * 32, row == 0, out + c * kPanel, columns * kPanel);
        });
        done = begin + tall - row;
        put(Tile{row, done, panel + p, columns, out + size_t(row - begin) * columns * kPanel});
      }
    }
  });
}
#endif
