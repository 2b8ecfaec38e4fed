#include "core/types.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace farandole {
namespace {

DType At(int i) { return static_cast<DType>(i); }

TEST(DType, HasASizeANameAndAKind) {
  const int64_t sizes[kDTypeCount] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 2, 4, 8, 8, 16, 1, 1};
  const char* names[kDTypeCount] = {
      "bool",    "uint8",     "int8",       "int16",         "int32",      "int64",
      "float16", "bfloat16",  "float32",    "float64",       "uint16",     "uint32",
      "uint64",  "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"};
  for (int i = 0; i < kDTypeCount; ++i) {
    EXPECT_EQ(SizeOf(At(i)), sizes[i]) << names[i];
    EXPECT_EQ(Name(At(i)), names[i]);
    EXPECT_EQ(IsFloating(At(i)), i >= static_cast<int>(DType::kFloat16) && IsReducible(At(i)))
        << names[i];
  }
}

TEST(CarrierOf, HoldsAsManyBytesAndCanBeReduced) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const Carrier carrier = CarrierOf(At(i));
    EXPECT_EQ(carrier.count * SizeOf(carrier.dtype), SizeOf(At(i))) << Name(At(i));
    EXPECT_TRUE(IsReducible(carrier.dtype)) << Name(At(i));
    EXPECT_EQ(carrier.dtype == At(i), IsReducible(At(i))) << Name(At(i));
  }
}

TEST(WireDType, IsTheTensorsOwnUnlessAskedOtherwise) {
  for (int i = 0; i < kDTypeCount; ++i) EXPECT_EQ(WireDType(At(i), WireFormat::kSame), At(i));
}

TEST(WireDType, Narrows32And64BitFloatsOnly) {
  EXPECT_EQ(WireDType(DType::kFloat32, WireFormat::kFloat16), DType::kFloat16);
  EXPECT_EQ(WireDType(DType::kFloat64, WireFormat::kBfloat16), DType::kBfloat16);
  EXPECT_EQ(WireDType(DType::kFloat16, WireFormat::kBfloat16), DType::kFloat16);
  EXPECT_EQ(WireDType(DType::kBfloat16, WireFormat::kFloat16), DType::kBfloat16);
  EXPECT_EQ(WireDType(DType::kInt32, WireFormat::kFloat16), DType::kInt32);
  EXPECT_EQ(WireDType(DType::kBool, WireFormat::kBfloat16), DType::kBool);
}

TEST(IsDefined, KeepsSumsFromBoolAndBitwiseOpsFromFloats) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kPreMulSum}) {
    EXPECT_FALSE(IsDefined(op, DType::kBool)) << Name(op);
    EXPECT_TRUE(IsDefined(op, DType::kUint8)) << Name(op);
  }
  for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    EXPECT_FALSE(IsDefined(op, DType::kBfloat16)) << Name(op);
    EXPECT_TRUE(IsDefined(op, DType::kBool)) << Name(op);
    EXPECT_TRUE(IsDefined(op, DType::kInt64)) << Name(op);
  }
  EXPECT_TRUE(IsDefined(ReduceOp::kMin, DType::kBool));
}

TEST(IsDefined, KeepsAdasumToFloats) {
  for (int i = 0; i < kDTypeCount; ++i) {
    EXPECT_EQ(IsDefined(ReduceOp::kAdasum, At(i)), IsFloating(At(i))) << Name(At(i));
  }
}

TEST(IsDefined, IsFalseForWhatIsOnlyMoved) {
  for (int i = kReducibleDTypeCount; i < kDTypeCount; ++i) {
    for (int op = 0; op <= static_cast<int>(kLastReduceOp); ++op) {
      EXPECT_FALSE(IsDefined(static_cast<ReduceOp>(op), At(i))) << Name(At(i));
    }
  }
}

TEST(Name, SaysWhatUsersWrite) {
  EXPECT_EQ(Name(ReduceOp::kAverage), "average");
  EXPECT_EQ(Name(OpKind::kAllreduce), "allreduce");
  EXPECT_EQ(Name(OpKind::kBroadcast), "broadcast");
  EXPECT_EQ(Name(DeviceKind::kCpu), "cpu");
}

TEST(Name, IsDifferentForEveryValue) {
  std::set<std::string_view> ops;
  for (int i = 0; i <= static_cast<int>(kLastReduceOp); ++i) {
    EXPECT_TRUE(ops.insert(Name(static_cast<ReduceOp>(i))).second);
  }
  std::set<std::string_view> kinds;
  for (int i = 0; i <= static_cast<int>(OpKind::kRemoveSet); ++i) {
    EXPECT_TRUE(kinds.insert(Name(static_cast<OpKind>(i))).second);
  }
}

}  // namespace
}  // namespace farandole
