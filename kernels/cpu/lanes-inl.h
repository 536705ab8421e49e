// The arithmetic of the kernels over a single float (ScalarLanes) and, where the instruction set has a fused
// multiply-add, over a vector of floats (Lanes). Compiled once per instruction set: no include guard but Highway's
// toggle.
#if defined(BALLAST_KERNELS_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_CPU_LANES_INL_H_
#undef BALLAST_KERNELS_CPU_LANES_INL_H_
#else
#define BALLAST_KERNELS_CPU_LANES_INL_H_
#endif

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ballast/kernels/float_formats.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Processors differ in the sign and payload of NaNs that they make or pass on; stored NaNs must not differ.
inline constexpr uint32_t kNanBits = 0x7fc00000u;

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

struct Lanes {
  using F = float;
  using U = uint32_t;
  using Uniform = float;
  static constexpr size_t kWidth = 1;

  static F Set(float x) { return x; }
  static Uniform SetUniform(float x) { return x; }
  static F Load(const float* from) { return *from; }
  static void Store(F x, float* to) { *to = x; }
  static F Add(F a, F b) { return a + b; }
  static F Sub(F a, F b) { return a - b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
  static F NegFma(F a, F b, F c) { return __builtin_fmaf(-a, b, c); }
  static F Sqrt(F a) { return __builtin_sqrtf(a); }
  static F Max(F a, F b) { return a > b || a != a ? a : b; }
  static F Sign(F a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
  static F OneNan(F a) { return a != a ? std::bit_cast<float>(kNanBits) : a; }

  // Unsigned integers, as many as floats.
  static U SetU(uint32_t x) { return x; }
  static U Bits(F a) { return std::bit_cast<uint32_t>(a); }
  static F FromBits(U a) { return std::bit_cast<float>(a); }
  static U AddU(U a, U b) { return a + b; }
  static U SubU(U a, U b) { return a - b; }
  static U And(U a, U b) { return a & b; }
  static U Or(U a, U b) { return a | b; }
  static U Xor(U a, U b) { return a ^ b; }
  static U MinU(U a, U b) { return a < b ? a : b; }
  static U MaxU(U a, U b) { return a > b ? a : b; }
  static U SelectLess(U a, U b, U yes, U no) { return a < b ? yes : no; }
  template <int kBits>
  static U ShiftLeft(U a) {
    return a << kBits;
  }
  template <int kBits>
  static U ShiftRight(U a) {
    return a >> kBits;
  }
  // Shift of a two's complement number; repeats the sign.
  template <int kBits>
  static U ShiftRightSigned(U a) {
    return static_cast<U>(static_cast<int32_t>(a) >> kBits);
  }
  static uint32_t MaxOfLanes(U a) { return a; }
  static U Load32(const std::byte* from) {
    U a;
    std::memcpy(&a, from, sizeof(a));
    return a;
  }
  template <bool kStream>
  static void Store32(U a, std::byte* to) {
    std::memcpy(to, &a, sizeof(a));
  }
  // Two-byte codes may lie at any address.
  static U Load16(const uint16_t* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof(half));
    return half;
  }
  static U Load8(const uint8_t* from) { return *from; }
  // The upper bits are zero.
  static void Store16(U a, uint16_t* to) {
    const auto half = static_cast<uint16_t>(a);
    std::memcpy(to, &half, sizeof(half));
  }
  static void Store8(U a, uint8_t* to) { *to = static_cast<uint8_t>(a); }
  template <bool kStream = false>
  static void Store8x4(U a, U b, U c, U d, uint8_t* to) {
    Store8(a, to), Store8(b, to + 1), Store8(c, to + 2), Store8(d, to + 3);
  }
  static void Stream(F x, float* to) { *to = x; }
  template <bool kStream>
  static void Store16x2(U a, U b, uint16_t* to) {
    Store16(a, to), Store16(b, to + 1);
  }
  // table[index mod 8]; the table has 16 floats, the first eight twice.
  static F LookupMod8(const float* table, U index) { return table[index % 8]; }
  static constexpr bool kLooksUp32 = false;
  // 0 to 2^23, exactly; and back, rounded to nearest even.
  static F FloatOf(U a) { return static_cast<float>(a); }
  static F FloatOfSigned(U a) { return static_cast<float>(static_cast<int32_t>(a)); }
  static U Round(F a) { return Bits(a + 0x1p23f) - Bits(0x1p23f); }
  // Of no NaN.
  static F MinF(F a, F b) { return a < b ? a : b; }
  static U SelectGreater(F a, F b, U yes, U no) { return a > b ? yes : no; }
  // `to`, plus `addend` where a > b.
  static U AddWhereGreater(U to, U addend, F a, F b) { return a > b ? to + addend : to; }
  static F F16Load(const uint16_t* from) { return FromF16(*from); }
  template <bool kStream>
  static void F16Store2(F a, F b, uint16_t* to) {
    to[0] = ToF16(a), to[1] = ToF16(b);
  }
  // The lowest bit of each lane, the first lane's lowest; and back, to 0 or 1. FromLowestBits ignores further bits.
  static uint32_t LowestBits(U a) { return a & 1; }
  static U FromLowestBits(uint32_t bits) { return bits & 1; }
  static void FlushStream() {}
  template <size_t kElements>
  static void PrefetchAhead(const float*) {}

  // Integers of 64 bits, of which lower halves count. MulLowW multiplies these, HighW puts the upper half there.
  using W = uint64_t;
  static constexpr size_t kWideWidth = 1;
  static W SetW(uint64_t x) { return x; }
  static W AddW(W a, W b) { return a + b; }
  static W Xor3W(W a, W b, W c) { return a ^ b ^ c; }
  static W HighW(W a) { return a >> 32; }
  static W MulLowW(W a, W b) { return uint64_t{static_cast<uint32_t>(a)} * static_cast<uint32_t>(b); }
  // Stores the lower halves of a, b, c and d, those of one lane together: lane i's come at place OrderW()[i], which is
  // the order that is cheapest.
  static W OrderW() { return 0; }
  static void StoreWordsW(W a, W b, W c, W d, uint16_t* to) {
    const uint32_t words[4] = {static_cast<uint32_t>(a), static_cast<uint32_t>(b), static_cast<uint32_t>(c),
                               static_cast<uint32_t>(d)};
    std::memcpy(to, words, sizeof(words));
  }
};

#else

struct Lanes {
  using DF = hn::ScalableTag<float>;
  using DU = hn::RebindToUnsigned<DF>;
  using DI = hn::RebindToSigned<DF>;
  using DH = hn::Rebind<uint16_t, DF>;
  using DB = hn::Rebind<uint8_t, DF>;
  using F = hn::Vec<DF>;
  using U = hn::Vec<DU>;
  static constexpr size_t kWidth = hn::MaxLanes(DF());
  // An F with one value in all lanes, for fields and arrays, in which SVE's vectors may not stand.
#if HWY_TARGET == HWY_SVE_256 || HWY_TARGET == HWY_SVE2_128
  struct Uniform {
    float x;
    HWY_INLINE operator F() const { return Set(x); }
  };
  static HWY_INLINE Uniform SetUniform(float x) { return {x}; }
#else
  using Uniform = F;
  static HWY_INLINE Uniform SetUniform(float x) { return Set(x); }
#endif

  static HWY_INLINE F Set(float x) { return hn::Set(DF(), x); }
  static HWY_INLINE F Load(const float* from) { return hn::LoadU(DF(), from); }
  static HWY_INLINE void Store(F x, float* to) { hn::StoreU(x, DF(), to); }
  static HWY_INLINE F Add(F a, F b) { return hn::Add(a, b); }
  static HWY_INLINE F Sub(F a, F b) { return hn::Sub(a, b); }
  static HWY_INLINE F Mul(F a, F b) { return hn::Mul(a, b); }
  static HWY_INLINE F Div(F a, F b) { return hn::Div(a, b); }
  static HWY_INLINE F Fma(F a, F b, F c) { return hn::MulAdd(a, b, c); }
  static HWY_INLINE F NegFma(F a, F b, F c) { return hn::NegMulAdd(a, b, c); }
  static HWY_INLINE F Sqrt(F a) { return hn::Sqrt(a); }
  static HWY_INLINE F Max(F a, F b) { return hn::IfThenElse(hn::Or(hn::Gt(a, b), hn::IsNaN(a)), a, b); }
  static HWY_INLINE F Sign(F a) {
    const F zero = hn::Zero(DF()), one = Set(1);
    return hn::IfThenElse(hn::Gt(a, zero), one, hn::IfThenElse(hn::Lt(a, zero), hn::Neg(one), a));
  }
  static HWY_INLINE F OneNan(F a) { return hn::IfThenElse(hn::IsNaN(a), FromBits(SetU(kNanBits)), a); }

  static HWY_INLINE U SetU(uint32_t x) { return hn::Set(DU(), x); }
  static HWY_INLINE U Bits(F a) { return hn::BitCast(DU(), a); }
  static HWY_INLINE F FromBits(U a) { return hn::BitCast(DF(), a); }
  static HWY_INLINE U AddU(U a, U b) { return hn::Add(a, b); }
  static HWY_INLINE U SubU(U a, U b) { return hn::Sub(a, b); }
  static HWY_INLINE U And(U a, U b) { return hn::And(a, b); }
  static HWY_INLINE U Or(U a, U b) { return hn::Or(a, b); }
  static HWY_INLINE U Xor(U a, U b) { return hn::Xor(a, b); }
  static HWY_INLINE U MinU(U a, U b) { return hn::Min(a, b); }
  static HWY_INLINE U MaxU(U a, U b) { return hn::Max(a, b); }
  static HWY_INLINE U SelectLess(U a, U b, U yes, U no) { return hn::IfThenElse(hn::Lt(a, b), yes, no); }
  template <int kBits>
  static HWY_INLINE U ShiftLeft(U a) {
    return hn::ShiftLeft<kBits>(a);
  }
  template <int kBits>
  static HWY_INLINE U ShiftRight(U a) {
    return hn::ShiftRight<kBits>(a);
  }
  template <int kBits>
  static HWY_INLINE U ShiftRightSigned(U a) {
    return hn::BitCast(DU(), hn::ShiftRight<kBits>(hn::BitCast(DI(), a)));
  }
  static HWY_INLINE uint32_t MaxOfLanes(U a) { return hn::GetLane(hn::MaxOfLanes(DU(), a)); }
  static HWY_INLINE U Load32(const std::byte* from) { return hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(from)); }
  template <bool kStream>
  static HWY_INLINE void Store32(U a, std::byte* to) {
    auto* words = reinterpret_cast<uint32_t*>(to);
    kStream ? hn::Stream(a, DU(), words) : hn::StoreU(a, DU(), words);
  }
  static HWY_INLINE U Load16(const uint16_t* from) { return hn::PromoteTo(DU(), hn::LoadU(DH(), from)); }
  static HWY_INLINE U Load8(const uint8_t* from) { return hn::PromoteTo(DU(), hn::LoadU(DB(), from)); }
  static HWY_INLINE void Store16(U a, uint16_t* to) { hn::StoreU(hn::DemoteTo(DH(), hn::BitCast(DI(), a)), DH(), to); }
  static HWY_INLINE void Store8(U a, uint8_t* to) { hn::StoreU(hn::DemoteTo(DB(), hn::BitCast(DI(), a)), DB(), to); }
  // Stores four vectors, one after the other. kStream: bypass the caches; `to` is aligned to the stored size.
  template <bool kStream = false>
  static HWY_INLINE void Store8x4(U a, U b, U c, U d, uint8_t* to) {
#if HWY_TARGET == HWY_AVX2
    // Packing works within halves of 16 bytes; one permutation at the end puts the groups of four in order.
    const hn::RepartitionToNarrow<DI> d16;
    const hn::Repartition<uint8_t, DI> d8;
    const auto low = hn::ReorderDemote2To(d16, hn::BitCast(DI(), a), hn::BitCast(DI(), b));
    const auto high = hn::ReorderDemote2To(d16, hn::BitCast(DI(), c), hn::BitCast(DI(), d));
    alignas(32) static constexpr int32_t kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const auto packed = hn::Vec256<uint8_t>{_mm256_packus_epi16(low.raw, high.raw)};
    const auto ordered =
        hn::BitCast(d8, hn::TableLookupLanes(hn::BitCast(DI(), packed), hn::SetTableIndices(DI(), kOrder)));
    kStream ? hn::Stream(ordered, d8, to) : hn::StoreU(ordered, d8, to);
#elif HWY_TARGET <= HWY_AVX3
    // The same with four groups of 16 bytes. Packing makes 255 of what is above.
    const hn::Repartition<uint8_t, DI> d8;
    alignas(64) static constexpr int32_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const __m512i low = _mm512_packus_epi32(a.raw, b.raw), high = _mm512_packus_epi32(c.raw, d.raw);
    const hn::Vec512<uint8_t> ordered{
        _mm512_permutexvar_epi32(hn::Load(DI(), kOrder).raw, _mm512_packus_epi16(low, high))};
    kStream ? hn::Stream(ordered, d8, to) : hn::StoreU(ordered, d8, to);
#else
    const auto store = [to](U x, size_t k) HWY_ATTR {
      const auto bytes = hn::DemoteTo(DB(), hn::BitCast(DI(), x));
      kStream ? hn::Stream(bytes, DB(), to + k * kWidth) : hn::StoreU(bytes, DB(), to + k * kWidth);
    };
    store(a, 0), store(b, 1), store(c, 2), store(d, 3);
#endif
  }
  // Stores past the caches; `to` is aligned to the vector.
  static HWY_INLINE void Stream(F x, float* to) { hn::Stream(x, DF(), to); }
  // Stores two vectors, one after the other.
  template <bool kStream>
  static HWY_INLINE void Store16x2(U a, U b, uint16_t* to) {
    const hn::Repartition<uint16_t, DU> d16;
#if HWY_TARGET == HWY_AVX2
    // Packing works within halves of 16 bytes; one permutation puts the groups of eight in order.
    const hn::Vec256<uint16_t> both{
        _mm256_permute4x64_epi64(_mm256_packus_epi32(a.raw, b.raw), _MM_SHUFFLE(3, 1, 2, 0))};
#elif HWY_TARGET <= HWY_AVX3
    alignas(64) static constexpr int64_t kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    const hn::Repartition<int64_t, DU> d64;
    const hn::Vec512<uint16_t> both{
        _mm512_permutexvar_epi64(hn::Load(d64, kOrder).raw, _mm512_packus_epi32(a.raw, b.raw))};
#else
    const auto both =
        hn::Combine(d16, hn::DemoteTo(DH(), hn::BitCast(DI(), b)), hn::DemoteTo(DH(), hn::BitCast(DI(), a)));
#endif
    kStream ? hn::Stream(both, d16, to) : hn::StoreU(both, d16, to);
  }
  static HWY_INLINE F LookupMod8(const float* table, U index) {
#if HWY_TARGET <= HWY_AVX3
    return F{_mm512_permutexvar_ps(index.raw, Load(table).raw)};
#elif HWY_TARGET == HWY_AVX2
    return F{_mm256_permutevar8x32_ps(Load(table).raw, index.raw)};
#else
    return hn::GatherIndex(DF(), table, hn::BitCast(DI(), And(index, SetU(7))));
#endif
  }
#if HWY_TARGET <= HWY_AVX3
  // table[index mod 32], in a single instruction.
  static constexpr bool kLooksUp32 = true;
  static HWY_INLINE F Lookup32(const float* table, U index) {
    return F{_mm512_permutex2var_ps(Load(table).raw, index.raw, Load(table + kWidth).raw)};
  }
  static HWY_INLINE U Lookup32(const uint32_t* table, U index) {
    const U low = hn::LoadU(DU(), table), high = hn::LoadU(DU(), table + kWidth);
    return U{_mm512_permutex2var_epi32(low.raw, index.raw, high.raw)};
  }
#else
  static constexpr bool kLooksUp32 = false;
#endif
  static HWY_INLINE F FloatOf(U a) { return hn::ConvertTo(DF(), hn::BitCast(DI(), a)); }
  static HWY_INLINE F FloatOfSigned(U a) { return hn::ConvertTo(DF(), hn::BitCast(DI(), a)); }
  static HWY_INLINE U Round(F a) { return SubU(Bits(Add(a, Set(0x1p23f))), SetU(0x4b000000u)); }
  static HWY_INLINE F MinF(F a, F b) { return hn::Min(a, b); }
  static HWY_INLINE U SelectGreater(F a, F b, U yes, U no) {
    return hn::IfThenElse(hn::RebindMask(DU(), hn::Gt(a, b)), yes, no);
  }
  static HWY_INLINE U AddWhereGreater(U to, U addend, F a, F b) {
    const auto greater = hn::RebindMask(DU(), hn::Gt(a, b));
#if HWY_TARGET <= HWY_AVX3
    return U{_mm512_mask_add_epi32(to.raw, greater.raw, to.raw, addend.raw)};
#else
    return AddU(to, hn::IfThenElseZero(greater, addend));
#endif
  }
  static HWY_INLINE F F16Load(const uint16_t* from) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    return hn::PromoteTo(DF(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from)));
  }
  template <bool kStream>
  static HWY_INLINE void F16Store2(F a, F b, uint16_t* to) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    const hn::Repartition<uint16_t, DU> d16;
    const auto both = hn::Combine(d16, hn::BitCast(DH(), hn::DemoteTo(dh, b)), hn::BitCast(DH(), hn::DemoteTo(dh, a)));
    kStream ? hn::Stream(both, d16, to) : hn::StoreU(both, d16, to);
  }
  static HWY_INLINE uint32_t LowestBits(U a) {
    static_assert(kWidth <= 32);
    uint8_t bits[8] = {};
    hn::StoreMaskBits(DU(), hn::TestBit(a, SetU(1)), bits);
    uint32_t word;
    std::memcpy(&word, bits, sizeof(word));
    return word;
  }
  static HWY_INLINE U FromLowestBits(uint32_t bits) {
    uint8_t bytes[8] = {};  // LoadMaskBits reads 8 at most
    std::memcpy(bytes, &bits, sizeof(bits));
    return hn::IfThenElseZero(hn::LoadMaskBits(DU(), bytes), SetU(1));
  }
  static HWY_INLINE void FlushStream() { hwy::FlushStream(); }
  // Prefetches every line of kElements that a loop will reach later. For loops over many arrays at a time: processors'
  // own prefetchers stop at pages.
  template <size_t kElements>
  static HWY_INLINE void PrefetchAhead(const float* at) {
    constexpr size_t kAhead = 512, kLine = 64 / sizeof(float);
    for (size_t i = 0; i < kElements; i += kLine) hwy::Prefetch(at + kAhead + i);
  }

  // Integers of 64 bits, half as many as floats.
  using DW = hn::Repartition<uint64_t, DF>;
  using W = hn::Vec<DW>;
  static constexpr size_t kWideWidth = kWidth / 2;
  static HWY_INLINE W SetW(uint64_t x) { return hn::Set(DW(), x); }
  static HWY_INLINE W AddW(W a, W b) { return hn::Add(a, b); }
  static HWY_INLINE W Xor3W(W a, W b, W c) { return hn::Xor3(a, b, c); }
  // A shuffle, because many processors shift on fewer ports. Leaves the lower half in the upper's place.
  static HWY_INLINE W HighW(W a) { return hn::BitCast(DW(), hn::Shuffle2301(hn::BitCast(DU(), a))); }
  static HWY_INLINE W MulLowW(W a, W b) { return hn::MulEven(hn::BitCast(DU(), a), hn::BitCast(DU(), b)); }
  static HWY_INLINE W OrderW() {
    alignas(64) uint64_t order[kWideWidth];
    for (size_t i = 0; i < kWideWidth; ++i) order[i] = i / 2 + i % 2 * (kWideWidth / 2);
    return hn::Load(DW(), order);
  }
  static HWY_INLINE void StoreWordsW(W a, W b, W c, W d, uint16_t* to) {
    const W low = hn::BitCast(DW(), hn::OddEven(hn::BitCast(DU(), hn::ShiftLeft<32>(b)), hn::BitCast(DU(), a)));
    const W high = hn::BitCast(DW(), hn::OddEven(hn::BitCast(DU(), hn::ShiftLeft<32>(d)), hn::BitCast(DU(), c)));
    auto* words = reinterpret_cast<uint64_t*>(to);
    hn::StoreU(hn::InterleaveLower(DW(), low, high), DW(), words);
    hn::StoreU(hn::InterleaveUpper(DW(), low, high), DW(), words + kWideWidth);
  }
};

#endif

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
