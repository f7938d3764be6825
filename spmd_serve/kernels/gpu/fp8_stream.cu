// Linear layers over FP8 (e4m3) weights for up to 16 tokens: out = residual + act(norm(x) @ (w * scales).T + bias).
//
// The weights' bytes are the cost, so they never stop coming: a block takes one tile of 16 weight rows after the other (in
// a gated layer 8 of the gate and the same 8 of up), its warps share the columns, and each thread keeps DEPTH pairs of
// 16-byte loads in flight, straight into registers and on into the next tile. The first ones are asked for before the wait
// for the kernel before this one (programmatic dependent launch).
//
// e4m3 becomes float16 exactly, in one instruction for two values, and is the A operand of the tensor cores. The tokens
// are the B operand: float16 in shared memory, times the norm's scale and a power of two for each token that makes its
// largest value some 2^14, so that float16's range costs nothing against bf16. Where they do not fit, the columns come in
// phases, each with powers of its own, and a block goes through its tiles once a phase.
//
// mma.m16n8k16 wants columns 2t, 2t+1, 2t+8, 2t+9 from thread t of a group of four. Which columns these are does not
// matter as long as both operands agree: thread t has the 16 columns 16t .. 16t+15 of a chunk of 64, four for each product.
//
// Sums are made in a fixed order: results are the same on every run.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace {

struct Arguments {
  const __nv_bfloat16* x;      // [tokens, >= columns], row stride x_stride
  const uint8_t* w;            // e4m3 [features (twice that if gated), columns]
  const float* w_scales;       // one for each row of w, or one for each 128 columns of a row (BLOCKED)
  const __nv_bfloat16* bias;   // as many as rows of w, or null
  const __nv_bfloat16* scale;  // [columns], the norm's, or null
  __nv_bfloat16* out;          // [tokens, features]
  int tokens, features, columns, x_stride;
  float eps;
  int activation;  // 0 none, 1 silu, 2 gelu_tanh: rows of w come in two halves, gate and up
  int add;         // out holds the residual
  int early;       // let the next kernel start: 1 after the wait, 2 when the last weights are asked for
  int tiles;         // of rows, all blocks'
  int rounds;        // of DEPTH chunks a warp, for all columns
  int phase_rounds;  // those whose tokens are in shared memory at once
};

constexpr int kMaxWarps = 16, kMaxTokens = 16, kChunk = 64, kBlock = 128;
constexpr int kPartPitch = 20;  // floats from one token's 16 sums to the next one's: no bank conflicts
constexpr int kTargetExponent = 14;

// What lies in shared memory, in bytes from its start.
struct Layout {
  int x_pitch, norm, parts, maxima, squares, tokens, totals, end;
};

__host__ __device__ inline Layout layout(int tokens, int columns, bool normed, int warps, int phase_columns, int kept_tiles) {
  Layout l;
  l.x_pitch = phase_columns * 2 + 16;                                  // f16 [tokens][phase_columns], 16: no bank conflicts
  l.norm = tokens * l.x_pitch;                                         // bf16 [columns]
  l.parts = l.norm + (normed ? columns * 2 : 0);                       // float [2][warps][tokens][kPartPitch]
  l.maxima = l.parts + 2 * warps * tokens * kPartPitch * 4;            // float [tokens][kMaxWarps]
  l.squares = l.maxima + tokens * kMaxWarps * 4;                       // float [tokens][kMaxWarps]
  l.tokens = l.squares + tokens * kMaxWarps * 4;                       // float [tokens]: unscale, then the sum of squares
  l.totals = l.tokens + 2 * kMaxTokens * 4;                            // float [kept_tiles][threads]
  l.end = l.totals + kept_tiles * warps * 32 * 4;
  return l;
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 weights that are read once: not to be kept in L1. Those beyond the last column stay what they were: finite, and
// multiplied by zero.
__device__ __forceinline__ void load_weights(uint4& v, const uint8_t* at, bool inside) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(at), "r"(static_cast<int>(inside))
      : "memory");
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void wait_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ uint32_t halves(uint32_t two_e4m3) {
  const __half2_raw v = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_e4m3), __NV_E4M3);
  return static_cast<uint32_t>(v.x) | static_cast<uint32_t>(v.y) << 16;
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ float activate(float gate, int kind) {
  const float exponent = kind == 1 ? -gate : -1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + __expf(exponent));
}

// 2^e such that `largest` * 2^e is in [2^14, 2^15), and 2^-e.
__device__ __forceinline__ float2 power(float largest) {
  const int biased = static_cast<int>(__float_as_uint(largest) >> 23);
  const int exponent = min(127 + kTargetExponent - biased, 100);
  return make_float2(__uint_as_float((127 + exponent) << 23), __uint_as_float((127 - exponent) << 23));
}

struct Eight {
  float v[8];
};

// Eight columns of a token, times the norm's scale; the squares of the token's own values are added to `squares`.
__device__ __forceinline__ Eight scaled(const unsigned char* x, const unsigned char* norm, float& squares) {
  const uint4 raw = *reinterpret_cast<const uint4*>(x);
  uint4 by = make_uint4(0, 0, 0, 0);
  if (norm != nullptr) by = *reinterpret_cast<const uint4*>(norm);
  const __nv_bfloat162* p = reinterpret_cast<const __nv_bfloat162*>(&raw);
  const __nv_bfloat162* q = reinterpret_cast<const __nv_bfloat162*>(&by);
  Eight out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 v = __bfloat1622float2(p[i]);
    squares += v.x * v.x + v.y * v.y;
    if (norm != nullptr) {
      const float2 s = __bfloat1622float2(q[i]);
      v.x *= s.x, v.y *= s.y;
    }
    out.v[2 * i] = v.x, out.v[2 * i + 1] = v.y;
  }
  return out;
}

// TILES: groups of 8 tokens. DEPTH: chunks of 64 columns, side by side, that a warp has on their way.
template <int TILES, int DEPTH, bool BLOCKED>
__global__ void __launch_bounds__(kMaxWarps * 32) stream(const Arguments a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x, warps = threads >> 5, blocks = gridDim.x;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int width = DEPTH * kChunk, round_columns = warps * width, own_column = warp * width + t * 16;
  const int phases = (a.rounds + a.phase_rounds - 1) / a.phase_rounds;
  const bool gated = a.activation != 0;
  const int tile_features = gated ? 8 : 16;
  const Layout at = layout(a.tokens, a.columns, a.scale != nullptr, warps, a.phase_rounds * round_columns, 0);
  float* const parts = reinterpret_cast<float*>(shared + at.parts);
  float* const maxima = reinterpret_cast<float*>(shared + at.maxima);
  float* const part_squares = reinterpret_cast<float*>(shared + at.squares);
  float* const unscale = reinterpret_cast<float*>(shared + at.tokens);
  float* const squares = unscale + kMaxTokens;
  float* const totals = reinterpret_cast<float*>(shared + at.totals);

  // The rows that are asked for. Those beyond the edge are something valid that is not used.
  const uint8_t *row0, *row1;
  const float *scales0 = nullptr, *scales1 = nullptr;
  const auto choose_rows = [&](int tile) {
    const int feature = tile * tile_features + g;
    const long long first = min(feature, a.features - 1);
    const long long second = gated ? a.features + first : min(feature + 8, a.features - 1);
    row0 = a.w + first * a.columns, row1 = a.w + second * a.columns;
    if (BLOCKED) {
      const int row_blocks = (a.columns + kBlock - 1) / kBlock;
      scales0 = a.w_scales + first * row_blocks, scales1 = a.w_scales + second * row_blocks;
    }
  };
  uint4 ring0[DEPTH], ring1[DEPTH];
  float by0[DEPTH], by1[DEPTH];
  const auto ask = [&](int slot, int column) {  // column: of this thread's first chunk
    const bool inside = column + slot * kChunk < a.columns;
    load_weights(ring0[slot], row0 + column + slot * kChunk, inside);
    load_weights(ring1[slot], row1 + column + slot * kChunk, inside);
    if (BLOCKED && column - t * 16 + slot * kChunk < a.columns) {  // all four threads of a row need its scale
      const int block = (column + slot * kChunk) / kBlock;
      by0[slot] = __ldg(scales0 + block), by1[slot] = __ldg(scales1 + block);
    }
  };
  choose_rows(blockIdx.x);
#pragma unroll
  for (int slot = 0; slot < DEPTH; ++slot) {
    ring0[slot] = ring1[slot] = make_uint4(0, 0, 0, 0), by0[slot] = by1[slot] = 0.0f;
    ask(slot, own_column);
  }
  if (a.scale != nullptr)
#pragma unroll 2
    for (int i = threadIdx.x; i < a.columns / 8; i += threads) copy_async(shared + at.norm + i * 16, a.scale + i * 8);

  wait_inputs();
  if (a.early == 1) start_next();

  // How the warps share the tokens while these are prepared.
  int rounded = 1;
  while (rounded < a.tokens) rounded *= 2;
  const int token_warps = max(1, warps / rounded), token_step = warps / token_warps;
  const int first_token = warp / token_warps, sub = warp % token_warps, vector_step = token_warps * 32;

  for (int phase = 0; phase < phases; ++phase) {
    const int begin = phase * a.phase_rounds, end = min(begin + a.phase_rounds, a.rounds);
    const int first_column = begin * round_columns;
    const int vectors = (end - begin) * round_columns / 8, known = min(vectors, (a.columns - first_column) / 8);
    const bool last_phase = phase + 1 == phases;

    if (phase > 0) __syncthreads();  // everybody is done with the columns before
    for (int token = first_token; token < a.tokens; token += token_step)
#pragma unroll 2
      for (int i = sub * 32 + lane; i < known; i += vector_step)
        copy_async(shared + token * at.x_pitch + i * 16, a.x + (size_t)token * a.x_stride + first_column + i * 8);
    wait_copies();
    __syncthreads();
    const unsigned char* norm = a.scale != nullptr ? shared + at.norm + first_column * 2 : nullptr;
    for (int token = first_token; token < a.tokens; token += token_step) {
      float largest = 0.0f, sum = 0.0f;
#pragma unroll 2
      for (int i = sub * 32 + lane; i < known; i += vector_step) {
        const Eight e = scaled(shared + token * at.x_pitch + i * 16, norm == nullptr ? nullptr : norm + i * 16, sum);
#pragma unroll
        for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(e.v[j]));
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask >>= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      }
      if (lane == 0) maxima[token * kMaxWarps + sub] = largest, part_squares[token * kMaxWarps + sub] = sum;
    }
    __syncthreads();
    for (int token = first_token; token < a.tokens; token += token_step) {
      float largest = 0.0f, sum = 0.0f, unused = 0.0f;
#pragma unroll 1
      for (int i = 0; i < token_warps; ++i) {
        largest = fmaxf(largest, maxima[token * kMaxWarps + i]);
        sum += part_squares[token * kMaxWarps + i];
      }
      const float2 by = power(largest);
#pragma unroll 2
      for (int i = sub * 32 + lane; i < vectors; i += vector_step) {
        unsigned char* const place = shared + token * at.x_pitch + i * 16;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (i < known) {
          const Eight e = scaled(place, norm == nullptr ? nullptr : norm + i * 16, unused);
          __half2* const h = reinterpret_cast<__half2*>(&packed);
#pragma unroll
          for (int j = 0; j < 4; ++j) h[j] = __floats2half2_rn(e.v[2 * j] * by.x, e.v[2 * j + 1] * by.x);
        }
        *reinterpret_cast<uint4*>(place) = packed;
      }
      if (sub == 0 && lane == 0) unscale[token] = by.y, squares[token] = phase == 0 ? sum : squares[token] + sum;
    }
    __syncthreads();

    const unsigned char* tokens[TILES];
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      tokens[j] = shared + min(j * 8 + g, a.tokens - 1) * at.x_pitch + own_column * 2;

    int turn = 0;  // the how manieth tile of this block
    for (int tile = blockIdx.x; tile < a.tiles; tile += blocks, ++turn) {
      // This thread's output, if it has one; each tile gives them to other warps. What it needs is on its way early.
      const int output = (threadIdx.x - turn * 32) & (threads - 1);
      const int token = output / tile_features, local = output % tile_features, feature = tile * tile_features + local;
      const bool mine = token < a.tokens && feature < a.features;
      float row_scale = 1.0f, up_scale = 1.0f, bias = 0.0f, up_bias = 0.0f, residual = 0.0f;
      if (last_phase && mine) {
        if (!BLOCKED) {
          row_scale = __ldg(a.w_scales + feature);
          if (gated) up_scale = __ldg(a.w_scales + a.features + feature);
        }
        if (a.bias != nullptr) {
          bias = __bfloat162float(a.bias[feature]);
          if (gated) up_bias = __bfloat162float(a.bias[a.features + feature]);
        }
        if (a.add) residual = __bfloat162float(a.out[(size_t)token * a.features + feature]);
      }

      float acc[TILES][2][4] = {};  // two, so that one product need not wait for the one before
      for (int round = begin; round < end; ++round) {
        int next_round = round + 1;
        if (next_round == end) {  // the next tile's first columns, or the first tile's next ones
          if (tile + blocks < a.tiles) {
            next_round = begin;
            choose_rows(tile + blocks);
          } else if (!last_phase) {
            choose_rows(blockIdx.x);
          } else {
            next_round = a.rounds;
            if (a.early == 2) start_next();
          }
        }
        const int offset = (round - begin) * round_columns * 2, next_column = next_round * round_columns + own_column;
#pragma unroll
        for (int slot = 0; slot < DEPTH; ++slot) {
          float part[TILES][4] = {};
          uint4 x[TILES][2];
#pragma unroll
          for (int j = 0; j < TILES; ++j) {
            const uint4* const from = reinterpret_cast<const uint4*>(tokens[j] + offset + slot * kChunk * 2);
            x[j][0] = from[0], x[j][1] = from[1];
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t w0 = word(ring0[slot], i), w1 = word(ring1[slot], i);
            const uint32_t a0 = halves(w0 & 0xffff), a1 = halves(w1 & 0xffff), a2 = halves(w0 >> 16), a3 = halves(w1 >> 16);
#pragma unroll
            for (int j = 0; j < TILES; ++j)
              mma(BLOCKED ? part[j] : acc[j][i % 2], a0, a1, a2, a3, word(x[j][i / 2], i % 2 * 2), word(x[j][i / 2], i % 2 * 2 + 1));
          }
          if (BLOCKED) {
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
              acc[j][0][0] += part[j][0] * by0[slot], acc[j][0][1] += part[j][1] * by0[slot];
              acc[j][0][2] += part[j][2] * by1[slot], acc[j][0][3] += part[j][3] * by1[slot];
            }
          }
          ask(slot, next_column);
          __syncwarp();  // or the compiler moves all of a round's loads behind its products
        }
      }

      // The warps' sums meet. Of two buffers, the other one may still be read.
      float* const buffer = parts + (turn & 1) * warps * a.tokens * kPartPitch;
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int of_token = j * 8 + 2 * t + (i & 1), row = g + (i & 2) * 4;
          if (of_token < a.tokens) buffer[(warp * a.tokens + of_token) * kPartPitch + row] = acc[j][0][i] + acc[j][1][i];
        }
      }
      __syncthreads();
      if (!mine) continue;
      float value = 0.0f, up = 0.0f;
#pragma unroll 4
      for (int i = 0; i < warps; ++i) {
        const float* const from = buffer + (i * a.tokens + token) * kPartPitch + local;
        value += from[0];
        if (gated) up += from[8];
      }
      value *= unscale[token], up *= unscale[token];
      if (phases > 1) {  // this thread alone has this place in each phase
        float* const total = totals + 2 * (turn * threads + output);
        if (phase > 0) value += total[0], up += total[1];
        total[0] = value, total[1] = up;
        if (!last_phase) continue;
      }
      const float inverse = a.scale == nullptr ? 1.0f : rsqrtf(squares[token] / a.columns + a.eps);
      value = value * inverse * row_scale + bias;
      if (gated) value = activate(value, a.activation) * (up * inverse * up_scale + up_bias);
      a.out[(size_t)token * a.features + feature] = __float2bfloat16(value + residual);
    }
    // The buffers of the last tile are read before the next phase's begin: the barriers above lie between.
  }
}

template <int TILES, bool BLOCKED>
const void* pick(int depth) {
  if (depth == 4) return reinterpret_cast<const void*>(stream<TILES, 4, BLOCKED>);
  if (depth == 5) return reinterpret_cast<const void*>(stream<TILES, 5, BLOCKED>);
  if constexpr (!BLOCKED) {  // their scales take registers
    if (depth == 6) return reinterpret_cast<const void*>(stream<TILES, 6, BLOCKED>);
    if (depth == 8) return reinterpret_cast<const void*>(stream<TILES, 8, BLOCKED>);
  }
  return nullptr;
}

int divide_up(int n, int by) { return (n + by - 1) / by; }

}  // namespace

// Launches on `stream`. scale_block: 0 (w_scales has one a row) or 128. warps of a block (4, 8 or 16), depth (4, 5, and
// without blocks 6 and 8; see DEPTH) and blocks a multiprocessor: how. dependent: 0 no programmatic dependent launch, 1 yes, 2 and 3 with `early` 1
// and 2. columns must be a multiple of 16, x_stride of 8, all pointers but w_scales and out 16-byte aligned.
// Returns a CUDA error code; -1: the shape does not fit this configuration.
extern "C" int fp8_stream(const void* x, const void* w, const void* w_scales, const void* bias, const void* scale, void* out,
                          int tokens, int features, int columns, int x_stride, float eps, int activation, int add,
                          int scale_block, int warps, int depth, int blocks, int dependent, int device,
                          cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  if (tokens < 1 || tokens > kMaxTokens || features < 1 || columns < 16 || columns % 16 != 0) return -1;
  if ((warps != 4 && warps != 8 && warps != 16) || (scale_block != 0 && scale_block != kBlock) || blocks < 1) return -1;
  const int tile_features = activation != 0 ? 8 : 16;
  if (tokens * tile_features > warps * 32) return -1;  // a thread has one output
  const bool blocked = scale_block != 0;
  const void* kernel = tokens <= 8 ? (blocked ? pick<1, true>(depth) : pick<1, false>(depth))
                                   : (blocked ? pick<2, true>(depth) : pick<2, false>(depth));
  if (kernel == nullptr) return -1;
  int processors = 0, per_processor = 0, per_block = 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);

  // As many blocks as are needed for the time of the one with most tiles: all have the same work, and run at once.
  const int tiles = divide_up(features, tile_features), turns = divide_up(tiles, processors * blocks);
  const int round_columns = depth * warps * kChunk, rounds = divide_up(columns, round_columns);
  const int available = min(per_block, per_processor / blocks - 1024);
  int phase_rounds = 0, bytes = 0;
  for (int phases = 1; phases <= rounds; ++phases) {
    phase_rounds = divide_up(rounds, phases);
    bytes = layout(tokens, columns, scale != nullptr, warps, phase_rounds * round_columns, phases > 1 ? 2 * turns : 0).end;
    if (bytes <= available) break;
  }
  if (bytes > available) return -1;

  Arguments a;
  a.x = static_cast<const __nv_bfloat16*>(x), a.w = static_cast<const uint8_t*>(w);
  a.w_scales = static_cast<const float*>(w_scales), a.bias = static_cast<const __nv_bfloat16*>(bias);
  a.scale = static_cast<const __nv_bfloat16*>(scale), a.out = static_cast<__nv_bfloat16*>(out);
  a.tokens = tokens, a.features = features, a.columns = columns, a.x_stride = x_stride, a.eps = eps;
  a.activation = activation, a.add = add, a.early = dependent > 1 ? dependent - 1 : 0;
  a.tiles = tiles, a.rounds = rounds, a.phase_rounds = phase_rounds;
  if (bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  cudaLaunchAttribute attributes[1];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(divide_up(tiles, turns), 1, 1);
  config.blockDim = dim3(warps * 32, 1, 1);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  config.numAttrs = dependent > 0 ? 1 : 0;
  void* arguments[] = {&a};
  return static_cast<int>(cudaLaunchKernelExC(&config, kernel, arguments));
}
