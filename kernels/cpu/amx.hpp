// Tiles of Intel's matrix unit (AMX): 16 rows of inputs, 64 bytes each, times as many inputs of 16 outputs.
//
// A packed panel is what the unit multiplies with: 16 outputs side by side, pairs of bfloat16 or quads of bytes below
// each other (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and TDPBUSD). A row's
// sums depend on that row alone and go through its inputs 32 at a time, so they are the same in any tile; denormals
// count as zero and sums round to nearest even, whatever the thread's settings.
// Included once per level, after bytes.hpp.

#if KVFERRY_AMX
constexpr int kTileTall = 16;   // of a tile
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

// Where a tile of `tall` rows begins that ends, at most, with the last of `rows`: what it computes twice is the same twice.
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
static void product_of_pairs(const Matrix& m, const Rows& x, int rows, int panel, int panels, Put&& put) {
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

// One block of packed codes to pairs of bfloat16, whole numbers all of them.
template <class Form>
[[gnu::always_inline]] static inline void unpack_pairs(const uint8_t* at, uint8_t* to) {
  if constexpr (Form::format == Format::codes4) {
    const P table = p_table4();
#pragma GCC unroll 4
    for (int g = 0; g < Form::block / 8; ++g) {
      const P words = p_load(at + g * 64);
      fetch(at + g * 64 + kAhead);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) p_store(to + (g * 4 + i) * 64, p_code4(words, table, i));
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < Form::block / 2; ++i) {
      if (i % 2 == 0) fetch(at + i * 32 + kAhead);
      p_store(to + i * 64, p_codes8((const int8_t*)at + i * 32));
    }
  }
}

// out [R][16], `out_stride` floats apart = R rows of x times one panel of codes, as in codes.hpp. A block's sums leave
// the unit, so that its scales can be applied; it computes the next four meanwhile. `pairs`: the unpacked panel, which
// the first rows make for all.
template <class Form, int R>
static inline void unit_codes(const Matrix& m, int panel, const Rows& x, uint8_t* pairs, bool is_first, float* out, int out_stride) {
  constexpr int block = Form::block, kAtOnce = 4;
  alignas(64) float sums[2 * kAtOnce][kTileTall * kPanel];
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const int blocks = m.depth / block;
  const uint8_t* at = m.data + size_t(panel) * m.panel_bytes;
  const size_t block_bytes = size_t(m.block_bytes()), code_bytes = size_t(m.code_bytes());
  V total[R][1];
  clear(total);
  const auto unpack = [&](int b) {
    if (is_first && b < blocks) unpack_pairs<Form>(at + b * block_bytes, pairs + size_t(b) * block * 32);
  };
  const auto begin = [&](auto number, int b) {
    constexpr int tile = decltype(number)::value;
    if (b >= blocks) return;
    t_zero<tile>();
    t_load<4 + tile % 2>(x.narrow + size_t(b) * block, size_t(x.stride) * 2);
    t_load<6 + tile % 2>(pairs + size_t(b) * block * 32, kTileBytes);
    t_pairs<tile, 4 + tile % 2, 6 + tile % 2>();
    t_store<tile>(sums[b % (2 * kAtOnce)], kTileBytes);
    unpack(b + kAtOnce);
  };
  const auto end = [&](int b) {
    if (b < 0 || b >= blocks) return;
    V scale, minimum, sum[R][1];
    load_scales(m, at + b * block_bytes + code_bytes, scale, minimum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r][0] = v_load(sums[b % (2 * kAtOnce)] + r * kPanel);
    add_column(total, sum, 0, scale, minimum, has_min, inputs.sums + b, inputs.stride, as_it_is);
  };
  for (int b = 0; b < kAtOnce; ++b) unpack(b);
  for (int b = 0; b < blocks + kAtOnce; b += kAtOnce) {
    begin(Count<0>{}, b);
    end(b - 4);
    begin(Count<1>{}, b + 1);
    end(b - 3);
    begin(Count<2>{}, b + 2);
    end(b - 2);
    begin(Count<3>{}, b + 3);
    end(b - 1);
  }
  store(total, out, out_stride);
}

// Matrices of codes, inputs as they are; `put` as in `product`.
template <class Put>
static void product_of_codes(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch, Put&& put) {
  alignas(64) float out[kTileTall * 2 * kPanel];
  const int tall = rows < kTileTall ? rows : kTileTall;
  with_codes(m, [&](auto form) {
    using Form = decltype(form);
    const Tiles tiles(tall, Form::block * 2);
    for (int p = 0, columns; p < panels; p += columns) {
      columns = panels - p >= 2 ? 2 : 1;
      for (int row = 0, done; row < rows; row += done) {
        const int begin = tile_begin(row, rows, tall);
        const Rows inputs = x.from(begin);
        with_count<kTileTall>(tall, [&](auto count) {
          for (int c = 0; c < columns; ++c)
            unit_codes<Form, decltype(count)::value>(m, panel + p + c, inputs, scratch + size_t(c) * m.depth * 32, row == 0, out + c * kPanel, columns * kPanel);
        });
        done = begin + tall - row;
        put(Tile{row, done, panel + p, columns, out + size_t(row - begin) * columns * kPanel});
      }
    }
  });
}
#endif
