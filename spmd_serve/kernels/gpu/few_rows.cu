// Paged attention of few decoding rows from their raw projection: norm of queries and key, rotation, cache write, attention.
// With few rows the time is that of the steps that wait for each other, not that of the bytes.
//
// A cluster takes one row and one KV head with its group of query heads; its warps share the tokens. A warp has two tiles of 16
// tokens of K and V on their way straight into registers, the first ones before it waits for the kernel before this one. Both
// products run on the tensor cores: scores = K x queries, out = V (transposed) x probabilities. Which dimension a thread's
// elements are does not matter as long as both operands agree, so each takes neighbouring ones with one load: of K columns
// 8t .. 8t+7 of 32 (thread t of a group of four, as in skinny.cu), of V D/16 ones from D/16 * g on (g: the group) and as many in
// the upper half. The warps' softmax states meet in shared memory, the blocks' in that of the cluster's first block. Sums run in
// a fixed order.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

struct Arguments {
  const __nv_bfloat16* qkv;  // [rows, (q_heads + 2 * kv_heads) * D]: queries, keys, values
  __nv_bfloat16* k_cache;    // [pages, page_size, kv_heads, D]
  __nv_bfloat16* v_cache;
  const int* page_table;     // [slots, table_stride]
  const long long* slots;    // [rows]
  const long long* lengths;  // [rows], with the newest token; 0: a padding row
  const long long* positions;       // [rows], of rope_table
  const float* rope_table;          // [positions, 2, D / 2], cosines and sines; null: no rotation
  const __nv_bfloat16* q_scale;     // [D], the norm's, or null
  const __nv_bfloat16* k_scale;
  __nv_bfloat16* out;               // [rows, q_heads, D]
  int kv_heads, group, page_size, table_stride;
  int window;                       // tokens that the newest one sees, itself included; 0: all
  float eps, scale, softcap;        // softcap 0: none
};

constexpr int kTile = 16, kHeads = 8, kMaxSplits = 8;
constexpr float kLog2e = 1.4426950408889634f;
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ uint32_t in_first_block(uint32_t address) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(remote) : "r"(address));
  return remote;
}

__device__ __forceinline__ void send(uint32_t to, float4 v, uint32_t barrier) {  // counts its bytes at the receiver's barrier
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void send(uint32_t to, float2 v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(v.x),
               "f"(v.y), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void wait_for(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier)
      : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int BYTES>
struct alignas(BYTES) Words {
  uint32_t at[BYTES / 4];
};

// Read once: not kept in L1. Predicated: behind a branch registers are copied, and a copy waits for the load.
__device__ __forceinline__ void load_if(bool wanted, Words<16>& v, const __nv_bfloat16* at) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
      : "+r"(v.at[0]), "+r"(v.at[1]), "+r"(v.at[2]), "+r"(v.at[3])
      : "l"(at), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ void load_if(bool wanted, Words<8>& v, const __nv_bfloat16* at) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2]; }"
               : "+r"(v.at[0]), "+r"(v.at[1])
               : "l"(at), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

__device__ __forceinline__ uint32_t as_word(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float capped(float score, float cap) {  // cap * tanh(score / cap)
  return cap * (1.0f - __fdividef(2.0f, 1.0f + __expf(__fdividef(2.0f * score, cap))));
}

__device__ __forceinline__ uint32_t transposed(uint32_t word) {  // an 8 x 8 matrix of pairs, over the warp
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(word));
  return out;
}

__device__ __forceinline__ float finite_or_zero(float top) { return top == -INFINITY ? 0.0f : top; }

// A lane's N neighbouring elements of a head, and what turns them into a query's or a key's.
template <int N>
struct HeadPart {
  float at[N];

  __device__ __forceinline__ void load(const __nv_bfloat16* head, int lane) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(head + lane * N + i));
      at[i] = pair.x, at[i + 1] = pair.y;
    }
  }

  __device__ __forceinline__ void store(__nv_bfloat16* head, int lane) const {
#pragma unroll
    for (int i = 0; i < N; i += 2)
      *reinterpret_cast<__nv_bfloat162*>(head + lane * N + i) = __floats2bfloat162_rn(at[i], at[i + 1]);
  }

  __device__ __forceinline__ void choose(bool first, const HeadPart& a, const HeadPart& b) {
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = first ? a.at[i] : b.at[i];
  }

  __device__ __forceinline__ void norm(const HeadPart& scale, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) squares += at[i] * at[i];
    const float inverse = rsqrtf(warp_sum(squares) / (32 * N) + eps);
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = at[i] * inverse * scale.at[i];
  }

  __device__ __forceinline__ void rotate(const HeadPart& cosine, const HeadPart& sine) {  // sine: with the half's sign
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = at[i] * cosine.at[i] + __shfl_xor_sync(kAll, at[i], 16) * sine.at[i];
  }
};

// 16 tokens of K and V, as a warp's threads hold them.
template <int D>
struct Tile {
  static constexpr int COLUMNS = D / 32, DIMS = D / 16;  // groups of 32 columns; a thread's elements of V in each half
  Words<16> k[2][COLUMNS];                               // tokens g and g + 8
  Words<2 * DIMS> v[4][2];                               // tokens 2t, 2t + 1, 2t + 8, 2t + 9

  // location: lane i's is token i's. cache: of the head. pitch: from token to token.
  __device__ __forceinline__ void load_k(bool wanted, const __nv_bfloat16* cache, int location, long long pitch, int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* from = cache + __shfl_sync(kAll, location, g + 8 * half) * pitch + 8 * t;
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) load_if(wanted, k[half][i], from + 32 * i);
    }
  }

  __device__ __forceinline__ void load_v(bool wanted, const __nv_bfloat16* cache, int location, long long pitch, int g, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto* from = cache + __shfl_sync(kAll, location, 2 * t + i % 2 + i / 2 * 8) * pitch + DIMS * g;
      load_if(wanted, v[i][0], from), load_if(wanted, v[i][1], from + D / 2);
    }
  }

  __device__ __forceinline__ uint32_t v_pair(int first, int half, int j) const {  // element j of tokens `first` and the next
    return __byte_perm(v[first][half].at[j / 2], v[first + 1][half].at[j / 2], j % 2 ? 0x7632 : 0x5410);
  }
};

// `count` (up to MOST) softmax states of a head together: four elements' sums, `pitch` apart, and maximum and sum of the weights.
template <int MOST>
__device__ __forceinline__ float4 merge(const float* sums, int pitch, const float2* softmax, int count, float2& state) {
  float2 of[MOST];
  float highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    of[i] = i < count ? softmax[i * kHeads] : make_float2(-INFINITY, 0.0f);
    highest = fmaxf(highest, of[i].x);
  }
  const float base = finite_or_zero(highest);
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float weights = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const float weight = exp2f(of[i].x - base);
    const float4 sum = i < count ? *reinterpret_cast<const float4*>(sums + i * pitch) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    total.x += weight * sum.x, total.y += weight * sum.y, total.z += weight * sum.z, total.w += weight * sum.w;
    weights += weight * of[i].y;
  }
  state = make_float2(highest, weights);
  return total;
}

template <int D, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 8 / WARPS) few_rows(const Arguments a) {
  constexpr int N = D / 32, COLUMNS = Tile<D>::COLUMNS, DIMS = Tile<D>::DIMS;  // N: a lane's elements of a head
  extern __shared__ __align__(16) float states[];             // [WARPS + 1][group][D], then [splits][group][D] of the cluster
  __shared__ __align__(16) __nv_bfloat16 queries[kHeads][D + 8], newest_k[D], newest_v[D];
  __shared__ float2 softmax[WARPS + 1][kHeads];               // maximum and sum
  __shared__ __align__(8) float2 blocks_softmax[kMaxSplits][kHeads];
  __shared__ __align__(8) uint64_t barrier;
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const bool last = split == splits - 1;
  float* blocks = states + (WARPS + 1) * a.group * D;
  if (split == 0 && threadIdx.x == 0) {
    const uint32_t bytes = splits * a.group * (4 * D + 8);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  // This warp's tiles of the tokens before the newest one.
  const int length = static_cast<int>(a.lengths[row]), end = length - 1;
  const int first = a.window > 0 ? max(length - a.window, 0) : 0;
  const int* table = a.page_table + a.slots[row] * a.table_stride;
  const int tiles = max(end - first + kTile - 1, 0) / kTile, each = (tiles + splits * WARPS - 1) / (splits * WARPS);
  const int low = (split * WARPS + warp) * each, high = min(low + each, tiles);
  const long long pitch = (long long)a.kv_heads * D;
  const auto locate = [&](int tile) {  // lane i: where token i of the tile lies, or anything
    const unsigned token = max(min(first + tile * kTile + (lane & 15), end - 1), 0), size = a.page_size;
    return static_cast<int>(table[token / size] * size + token % size);
  };
  const __nv_bfloat16 *k_cache = a.k_cache + head * D, *v_cache = a.v_cache + head * D;
  Tile<D> ring[2] = {};  // the tiles that are on their way, and where those after them lie
  const int here[2] = {locate(low), locate(low + 1)};
  int locations[2] = {locate(low + 2), locate(low + 3)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool wanted = low + i < high;
    ring[i].load_k(wanted, k_cache, here[i], pitch, g, t), ring[i].load_v(wanted, v_cache, here[i], pitch, g, t);
  }
  HeadPart<N> cosine, sine, q_scale, k_scale;
  if (a.rope_table != nullptr) {
    const float* angles = a.rope_table + a.positions[row] * D + lane * N % (D / 2);
#pragma unroll
    for (int i = 0; i < N; ++i) cosine.at[i] = angles[i], sine.at[i] = lane < 16 ? -angles[D / 2 + i] : angles[D / 2 + i];
  }
  if (a.q_scale != nullptr) q_scale.load(a.q_scale, lane), k_scale.load(a.k_scale, lane);

  asm volatile("griddepcontrol.wait;" ::: "memory");

  // Queries, and in the last block the newest token's key and value, which go into the cache as well.
  const int q_heads = a.kv_heads * a.group;
  const __nv_bfloat16* projected = a.qkv + (long long)row * (q_heads + 2 * a.kv_heads) * D;
#pragma unroll 1
  for (int i = warp; i < a.group + 2 * last; i += WARPS) {
    const bool is_query = i < a.group, is_key = i == a.group;
    const int from = is_query ? head * a.group + i : q_heads + head + (is_key ? 0 : a.kv_heads);
    HeadPart<N> part;
    part.load(projected + from * D, lane);
    if (is_query || is_key) {
      HeadPart<N> norm_scale;
      norm_scale.choose(is_query, q_scale, k_scale);
      if (a.q_scale != nullptr) part.norm(norm_scale, a.eps);
      if (a.rope_table != nullptr) part.rotate(cosine, sine);
    }
    part.store(is_query ? queries[i] : is_key ? newest_k : newest_v, lane);
    if (!is_query && length > 0) {
      const long long at = ((long long)table[end / a.page_size] * a.page_size + end % a.page_size) * pitch + head * D;
      part.store((is_key ? a.k_cache : a.v_cache) + at, lane);
    }
  }
  __syncthreads();

  Words<16> q[COLUMNS];
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i)
    q[i] = g < a.group ? *reinterpret_cast<const Words<16>*>(&queries[g][32 * i + 8 * t]) : Words<16>{};
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {}, acc[DIMS][4] = {};  // of heads 2t and 2t + 1
  const auto attend = [&](Tile<D>& kv, int& location, int tile) {
    const bool more = tile + 2 < high;  // what takes its place
    float s[2][4] = {};  // two sums of the same four: tokens g and g + 8 with heads 2t and 2t + 1
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const uint32_t *k0 = kv.k[0][i].at, *k1 = kv.k[1][i].at;
      mma(s[0], k0[0], k1[0], k0[1], k1[1], q[i].at[0], q[i].at[1]);
      mma(s[1], k0[2], k1[2], k0[3], k1[3], q[i].at[2], q[i].at[3]);
    }
    kv.load_k(more, k_cache, location, pitch, g, t);
    const int there = end - first - tile * kTile;
    float keep[2], p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = (s[0][i] + s[1][i]) * a.scale;
    if (a.softcap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = capped(p[i], a.softcap);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = g + i / 2 * 8 < there ? p[i] * kLog2e : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float best = fmaxf(p[i], p[2 + i]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(kAll, best, step));
      best = fmaxf(best, top[i]);
      const float base = finite_or_zero(best);
      keep[i] = exp2f(top[i] - base), p[i] = exp2f(p[i] - base), p[2 + i] = exp2f(p[2 + i] - base);
      top[i] = best, total[i] = total[i] * keep[i] + p[i] + p[2 + i];
    }
    const uint32_t p0 = transposed(as_word(p[0], p[1])), p1 = transposed(as_word(p[2], p[3]));
#pragma unroll
    for (int j = 0; j < DIMS; ++j) {
      acc[j][0] *= keep[0], acc[j][1] *= keep[1], acc[j][2] *= keep[0], acc[j][3] *= keep[1];
      mma(acc[j], kv.v_pair(0, 0, j), kv.v_pair(0, 1, j), kv.v_pair(2, 0, j), kv.v_pair(2, 1, j), p0, p1);
    }
    kv.load_v(more, v_cache, location, pitch, g, t);
    location = locate(tile + 4);
  };
  for (int tile = low; tile < high; tile += 2) {
    attend(ring[0], locations[0], tile);
    if (tile + 1 < high) attend(ring[1], locations[1], tile + 1);
  }
  asm volatile("griddepcontrol.launch_dependents;");

  // The warps' states; the newest token is one more.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) total[i] += __shfl_xor_sync(kAll, total[i], step);
    if (g == 0) softmax[warp][2 * t + i] = make_float2(top[i], total[i]);
    if (2 * t + i >= a.group) continue;
    float* to = states + (warp * a.group + 2 * t + i) * D + DIMS * g;
#pragma unroll
    for (int j = 0; j < DIMS; ++j) to[j] = acc[j][i], to[D / 2 + j] = acc[j][2 + i];
  }
  const bool has_newest = last && length > 0;
#pragma unroll 1
  for (int h = has_newest ? warp : a.group; h < a.group; h += WARPS) {
    HeadPart<N> key, value, query;
    key.load(newest_k, lane), value.load(newest_v, lane), query.load(queries[h], lane);
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) score += query.at[i] * key.at[i];
    score = warp_sum(score) * a.scale;
    if (a.softcap > 0.0f) score = capped(score, a.softcap);
    if (lane == 0) softmax[WARPS][h] = make_float2(score * kLog2e, 1.0f);
#pragma unroll
    for (int i = 0; i < N; ++i) states[(WARPS * a.group + h) * D + lane * N + i] = value.at[i];
  }
  __syncthreads();

  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the first block's barrier is there
  const uint32_t arrived = in_first_block(shared_address(&barrier));
#pragma unroll 1
  for (int at = threadIdx.x; at < a.group * D / 4; at += WARPS * 32) {
    const int h = at / (D / 4);
    float2 state;
    const float4 sum = merge<WARPS + 1>(states + 4 * at, a.group * D, &softmax[0][h], WARPS + has_newest, state);
    send(in_first_block(shared_address(blocks + split * a.group * D + 4 * at)), sum, arrived);
    if (at % (D / 4) == 0) send(in_first_block(shared_address(&blocks_softmax[split][h])), state, arrived);
  }
  if (split > 0) return;
  wait_for(shared_address(&barrier));
#pragma unroll 1
  for (int at = threadIdx.x; at < a.group * D / 4; at += WARPS * 32) {
    float2 state;
    const float4 sum = merge<kMaxSplits>(blocks + 4 * at, a.group * D, &blocks_softmax[0][at / (D / 4)], splits, state);
    const float inverse = state.y == 0.0f ? 0.0f : __fdividef(1.0f, state.y);  // 0: a padding row
    const uint2 words = {as_word(sum.x * inverse, sum.y * inverse), as_word(sum.z * inverse, sum.w * inverse)};
    *reinterpret_cast<uint2*>(a.out + ((long long)row * q_heads + head * a.group) * D + 4 * at) = words;
  }
}

template <int D>
const void* pick(int warps) {
  if (warps == 4) return reinterpret_cast<const void*>(few_rows<D, 4>);
  return warps == 8 ? reinterpret_cast<const void*>(few_rows<D, 8>) : nullptr;
}

}  // namespace

// Launches on `stream`; dependent: with programmatic dependent launch. All pointers are 16-byte aligned. splits: blocks of a
// cluster. Returns a CUDA error code; -1: there is no kernel for the shape.
extern "C" int few_rows_attention(const void* qkv, void* k_cache, void* v_cache, const void* page_table, const void* slots,
                                  const void* lengths, const void* positions, const void* rope_table, const void* q_scale,
                                  const void* k_scale, void* out, int rows, int kv_heads, int group, int head_dim,
                                  int page_size, int table_stride, int window, float eps, float scale, float softcap, int splits,
                                  int warps, int dependent, int device, cudaStream_t stream) {
  int current = -1;  // this library's runtime is its own: it may not know what torch's has set
  if (cudaGetDevice(&current) != cudaSuccess || current != device) cudaSetDevice(device);
  const void* kernel = head_dim == 128 ? pick<128>(warps) : head_dim == 64 ? pick<64>(warps) : nullptr;
  if (kernel == nullptr || group > kHeads || splits > kMaxSplits) return -1;
  Arguments a;
  a.qkv = static_cast<const __nv_bfloat16*>(qkv);
  a.k_cache = static_cast<__nv_bfloat16*>(k_cache), a.v_cache = static_cast<__nv_bfloat16*>(v_cache);
  a.page_table = static_cast<const int*>(page_table), a.slots = static_cast<const long long*>(slots);
  a.lengths = static_cast<const long long*>(lengths), a.positions = static_cast<const long long*>(positions);
  a.rope_table = static_cast<const float*>(rope_table);
  a.q_scale = static_cast<const __nv_bfloat16*>(q_scale), a.k_scale = static_cast<const __nv_bfloat16*>(k_scale);
  a.out = static_cast<__nv_bfloat16*>(out);
  a.kv_heads = kv_heads, a.group = group, a.page_size = page_size, a.table_stride = table_stride, a.window = window;
  a.eps = eps, a.scale = scale, a.softcap = softcap;
  const size_t bytes = 4 * (warps + 1 + splits) * group * head_dim;
  cudaError_t error = cudaSuccess;
  if (bytes > 32 * 1024) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(splits, kv_heads, rows);
  config.blockDim = dim3(warps * 32, 1, 1);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = splits, attributes[0].val.clusterDim.y = 1, attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.numAttrs = dependent > 0 ? 2 : 1;
  void* arguments[] = {&a};
  return static_cast<int>(cudaLaunchKernelExC(&config, kernel, arguments));
}
