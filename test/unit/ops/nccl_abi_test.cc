// Our declarations of NCCL against its own header: this compiles, or they differ.
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "ops/gpu/nccl/library.h"

namespace farandole {
namespace {

/// What we call a type of theirs; their own name for everything we do not redeclare.
template <class T>
struct Ours {
  using type = T;
};
template <class T>
using OursT = typename Ours<T>::type;
template <>
struct Ours<ncclResult_t> {
  using type = NcclResult;
};
template <>
struct Ours<ncclDataType_t> {
  using type = NcclDataType;
};
template <>
struct Ours<ncclRedOp_t> {
  using type = NcclRedOp;
};
template <>
struct Ours<ncclComm_t> {
  using type = NcclComm;
};
template <>
struct Ours<cudaStream_t> {
  using type = NcclStream;
};
template <>
struct Ours<ncclUniqueId> {
  using type = NcclUniqueId;
};
template <>
struct Ours<ncclConfig_t> {
  using type = NcclConfig;
};
template <class T>
struct Ours<T*> {
  using type = OursT<T>*;
};
template <class Return, class... Arguments>
struct Ours<Return (*)(Arguments...)> {
  using type = OursT<Return> (*)(OursT<Arguments>...);
};

#define EXPECT_SIGNATURE(name) \
  static_assert(std::is_same_v<OursT<decltype(&nccl##name)>, decltype(NcclApi::name)>, #name)
EXPECT_SIGNATURE(GetVersion);
EXPECT_SIGNATURE(GetUniqueId);
EXPECT_SIGNATURE(GetErrorString);
EXPECT_SIGNATURE(GetLastError);
EXPECT_SIGNATURE(CommInitRankConfig);
EXPECT_SIGNATURE(CommGetAsyncError);
EXPECT_SIGNATURE(CommFinalize);
EXPECT_SIGNATURE(CommDestroy);
EXPECT_SIGNATURE(CommAbort);
EXPECT_SIGNATURE(AllReduce);
EXPECT_SIGNATURE(Broadcast);
EXPECT_SIGNATURE(AllGather);
EXPECT_SIGNATURE(ReduceScatter);
EXPECT_SIGNATURE(Send);
EXPECT_SIGNATURE(Recv);
EXPECT_SIGNATURE(MemAlloc);
EXPECT_SIGNATURE(MemFree);
EXPECT_SIGNATURE(CommRegister);
EXPECT_SIGNATURE(GroupStart);
EXPECT_SIGNATURE(GroupEnd);
#undef EXPECT_SIGNATURE

#define EXPECT_NUMBER(ours, theirs) \
  static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
EXPECT_NUMBER(NcclResult::kSuccess, ncclSuccess);
EXPECT_NUMBER(NcclResult::kUnhandledCudaError, ncclUnhandledCudaError);
EXPECT_NUMBER(NcclResult::kSystemError, ncclSystemError);
EXPECT_NUMBER(NcclResult::kInternalError, ncclInternalError);
EXPECT_NUMBER(NcclResult::kInvalidArgument, ncclInvalidArgument);
EXPECT_NUMBER(NcclResult::kInvalidUsage, ncclInvalidUsage);
EXPECT_NUMBER(NcclResult::kRemoteError, ncclRemoteError);
EXPECT_NUMBER(NcclResult::kInProgress, ncclInProgress);
EXPECT_NUMBER(NcclDataType::kInt8, ncclInt8);
EXPECT_NUMBER(NcclDataType::kUint8, ncclUint8);
EXPECT_NUMBER(NcclDataType::kInt32, ncclInt32);
EXPECT_NUMBER(NcclDataType::kInt64, ncclInt64);
EXPECT_NUMBER(NcclDataType::kFloat16, ncclFloat16);
EXPECT_NUMBER(NcclDataType::kFloat32, ncclFloat32);
EXPECT_NUMBER(NcclDataType::kFloat64, ncclFloat64);
EXPECT_NUMBER(NcclDataType::kBfloat16, ncclBfloat16);
EXPECT_NUMBER(NcclRedOp::kSum, ncclSum);
EXPECT_NUMBER(NcclRedOp::kProd, ncclProd);
EXPECT_NUMBER(NcclRedOp::kMax, ncclMax);
EXPECT_NUMBER(NcclRedOp::kMin, ncclMin);
EXPECT_NUMBER(NcclRedOp::kAvg, ncclAvg);
#undef EXPECT_NUMBER

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(sizeof(NcclResult) == sizeof(ncclResult_t));
static_assert(sizeof(NcclDataType) == sizeof(ncclDataType_t));
static_assert(sizeof(NcclRedOp) == sizeof(ncclRedOp_t));
static_assert(kNcclUndefined == NCCL_CONFIG_UNDEF_INT);

static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(alignof(NcclConfig) == alignof(ncclConfig_t));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(NcclConfig, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, split_share) == offsetof(ncclConfig_t, splitShare));

// What a header may lack: checked as far as it goes, by what depends on a template parameter.
template <class Config>
constexpr bool HasSameTrafficClass() {
  if constexpr (requires(Config c) { c.trafficClass; }) {
    return offsetof(NcclConfig, traffic_class) == offsetof(Config, trafficClass);
  }
  return true;
}
static_assert(HasSameTrafficClass<ncclConfig_t>());
TEST(NcclAbi, BeginsAConfigurationAsTheHeaderDoes) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_LE(ours.size, theirs.size);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.cga_cluster_size, theirs.cgaClusterSize);
  EXPECT_EQ(ours.min_ctas, theirs.minCTAs);
  EXPECT_EQ(ours.max_ctas, theirs.maxCTAs);
  EXPECT_EQ(ours.net_name, theirs.netName);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
}

}  // namespace
}  // namespace farandole
