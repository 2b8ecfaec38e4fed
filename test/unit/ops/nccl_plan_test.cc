// How batches go over NCCL, as text: what our kernels pack, the calls, what they unpack, the
// buffer.
#include <gtest/gtest.h>

#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/gpu/nccl/plan.h"
#include "test/unit/ops/batch_in_text.h"

namespace farandole {
namespace {

using Kind = NcclCall::Kind;
/// "in0", "out2+24" (bytes), "buf", "none".
std::string ToText(const void* memory) {
  if (memory == nullptr) return "none";
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const auto area = static_cast<Area>(address >> 44);
  std::string text = area == Area::kIn ? "in" : area == Area::kOut ? "out" : "buf";
  if (area != Area::kBuffer) text += std::to_string(address >> 40 & 15);
  const uintptr_t offset = address & ((uintptr_t{1} << 40) - 1);
  return offset == 0 ? text : text + "+" + std::to_string(offset);
}

std::string ToText(const NcclCall& call) {
  constexpr const char* kKinds[] = {"AllReduce",     "Broadcast", "AllGather",
                                    "ReduceScatter", "Send",      "Recv"};
  constexpr const char* kTypes[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                    "uint64", "float16", "float32", "float64", "bfloat16"};
  constexpr const char* kOps[] = {"sum", "prod", "max", "min", "avg"};
  std::ostringstream text;
  text << kKinds[static_cast<int>(call.kind)] << ' ';
  if (call.kind == Kind::kAllReduce || call.kind == Kind::kReduceScatter) {
    text << kOps[static_cast<int>(call.op)] << ' ';
  } else if (call.kind != Kind::kAllGather) {
    text << "rank " << call.peer << ' ';
  }
  text << call.count << ' ' << kTypes[static_cast<int>(call.type)];
  return text.str() + " " + ToText(call.in) + ">" + ToText(call.out);
}

/// A launch: its types, its factor, what stands for nothing, and counts with from where to where.
std::string ToText(const CastSpec& spec, const std::vector<CastItem>& items) {
  if (items.empty()) return "";
  std::ostringstream text;
  text << Name(spec.from) << ">" << Name(spec.to);
  if (spec.scale != 1.0) text << " *" << spec.scale;
  if (spec.divisor != 1) text << " /" << spec.divisor;
  const char* comma = ": ";
  for (const CastItem& item : items) {
    text << comma << item.count << ' ' << ToText(item.in) << '>' << ToText(item.out);
    comma = ", ";
  }
  return text.str();
}

NcclPlan Plan(const BatchInText& given, int64_t* buffer_bytes = nullptr) {
  NcclPlan plan;
  const auto give = [&](int64_t size_bytes) {
    if (buffer_bytes != nullptr) *buffer_bytes = size_bytes;
    return Result<void*>(Memory(Area::kBuffer));
  };
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(PlanNccl(given.batch, give, plan).ok());  // anew
  return plan;
}

std::string PlanOf(const BatchInText& given) {
  int64_t buffer_bytes = 0;
  const NcclPlan plan = Plan(given, &buffer_bytes);
  std::string text;
  const auto add = [&](const std::string& title, const std::string& what) {
    if (!what.empty()) text += (text.empty() ? "" : "; ") + title + what;
  };
  add("pack ", ToText(plan.pack_spec, plan.pack));
  for (const NcclCall& call : plan.calls) add("", ToText(call));
  add("unpack ", ToText(plan.unpack_spec, plan.unpack));
  if (buffer_bytes > 0) add("buffer ", std::to_string(buffer_bytes));
  return text.empty() ? "nothing" : text;
}

/// "# promise", then batches -> plans; a line that is indented goes on with the one before it.
constexpr char kPlans[] = R"(
# bool is uint8
allreduce dtype=bool op=max -> AllReduce max 5 uint8 in0>out0; unpack uint8>uint8: 5 out0>out0
allreduce dtype=uint8 op=max -> AllReduce max 5 uint8 in0>out0; unpack uint8>uint8: 5 out0>out0
allreduce dtype=int8 op=max -> AllReduce max 5 int8 in0>out0; unpack uint8>uint8: 5 out0>out0
# NCCL has no int16
allreduce dtype=int16 op=max -> pack int16>int32: 5 in0>buf; AllReduce max 5 int32 buf>buf;
    unpack int32>int16: 5 buf>out0; buffer 20
allreduce dtype=int32 op=max -> AllReduce max 5 int32 in0>out0; unpack int32>int32: 5 out0>out0
allreduce dtype=int64 op=max -> AllReduce max 5 int64 in0>out0; unpack int64>int64: 5 out0>out0
allreduce dtype=float16 op=max -> AllReduce max 5 float16 in0>out0; unpack int16>int16: 5 out0>out0
allreduce dtype=bfloat16 op=max -> AllReduce max 5 bfloat16 in0>out0;
    unpack int16>int16: 5 out0>out0
allreduce dtype=float64 op=max -> AllReduce max 5 float64 in0>out0; unpack int64>int64: 5 out0>out0
# one tensor that needs nothing is used where it is, and its result can be poisoned, bit by bit
allreduce ranks=3 counts=0,7,0 -> AllReduce sum 7 float32 in1>out1; unpack int32>int32: 7 out1>out1
allreduce ranks=3 op=average -> AllReduce avg 5 float32 in0>out0; unpack int32>int32: 5 out0>out0
allreduce ranks=3 op=min -> AllReduce min 5 float32 in0>out0; unpack int32>int32: 5 out0>out0
allreduce ranks=3 op=product -> AllReduce prod 5 float32 in0>out0; unpack int32>int32: 5 out0>out0
# one tensor that needs a cast is packed
allreduce wire=float16 -> pack float32>float16: 5 in0>buf; AllReduce sum 5 float16 buf>buf;
    unpack float16>float32: 5 buf>out0; buffer 10
# one that needs a factor is packed
allreduce pre=0.5 -> pack float32>float32 *0.5: 5 in0>buf; AllReduce sum 5 float32 buf>buf;
    unpack float32>float32: 5 buf>out0; buffer 20
allreduce post=0.5 -> pack float32>float32: 5 in0>buf; AllReduce sum 5 float32 buf>buf;
    unpack float32>float32 *0.5: 5 buf>out0; buffer 20
# each tensor begins at sixteen bytes
allreduce counts=5,0,4,1 wire=float16 ->
    pack float32>float16: 5 in0>buf, 4 in2>buf+16, 1 in3>buf+32; AllReduce sum 17 float16 buf>buf;
    unpack float16>float32: 5 buf>out0, 4 buf+16>out2, 1 buf+32>out3; buffer 34
# an absent contribution is filled in where the result will be
allreduce absent -> pack float32>float32: 5 none>out0; AllReduce sum 5 float32 out0>out0;
    unpack int32>int32: 5 out0>out0
# what nobody wants is received in the buffer
allreduce absent drop=0 -> pack float32>float32: 5 none>buf; AllReduce sum 5 float32 buf>buf;
    buffer 20
# the identity is packed, and nothing unpacked, where a rank joined
allreduce counts=2,3 absent drop=0,1 -> pack float32>float32: 2 none>buf, 3 none>buf+16;
    AllReduce sum 7 float32 buf>buf; buffer 28
# 16-bit averages are divided before the rounding
allreduce ranks=3 counts=2,2 wire=bfloat16 op=average pre=6 ->
    pack float32>bfloat16 *2: 2 in0>buf, 2 in1>buf+16; AllReduce sum 10 bfloat16 buf>buf;
    unpack bfloat16>float32: 2 buf>out0, 2 buf+16>out1; buffer 20
# NCCL averages 16 bits where that is exact
allreduce dtype=float16 op=average -> AllReduce avg 5 float16 in0>out0;
    unpack int16>int16: 5 out0>out0
# and nowhere else
allreduce ranks=3 dtype=float16 op=average -> pack float16>float16 *0.333333: 5 in0>buf;
    AllReduce sum 5 float16 buf>buf; unpack float16>float16: 5 buf>out0; buffer 10
# integers that are divided are summed in 64 bits
allreduce ranks=3 dtype=int8 op=average post=0.5 -> pack int8>int64: 5 in0>buf;
    AllReduce sum 5 int64 buf>buf; unpack int64>int8 *0.5 /3: 5 buf>out0; buffer 40
# integers that are scaled later, too
allreduce ranks=3 dtype=int8 op=product post=2 -> pack int8>int64: 5 in0>buf;
    AllReduce prod 5 int64 buf>buf; unpack int64>int8 *2: 5 buf>out0; buffer 40
# the greatest cannot overflow
allreduce ranks=3 dtype=int8 op=max post=2 -> pack int8>int8: 5 in0>buf;
    AllReduce max 5 int8 buf>buf; unpack int8>int8 *2: 5 buf>out0; buffer 5
# the launch that packs multiplies
allreduce wire=float16 pre=10 -> pack float32>float16 *10: 5 in0>buf;
    AllReduce sum 5 float16 buf>buf; unpack float16>float32: 5 buf>out0; buffer 10
allreduce dtype=int32 pre=10 -> pack int32>int32 *10: 5 in0>buf; AllReduce sum 5 int32 buf>buf;
    unpack int32>int32: 5 buf>out0; buffer 20
# also where it widens
allreduce dtype=int16 counts=3,3 pre=10 -> pack int16>int32 *10: 3 in0>buf, 3 in1>buf+16;
    AllReduce sum 7 int32 buf>buf; unpack int32>int16: 3 buf>out0, 3 buf+16>out1; buffer 28
# nothing is called for no elements
allreduce ranks=4 counts=0,0 -> nothing
# counts go beyond 32 bits
allreduce counts=6442450944,6442450944 ->
    pack float32>float32: 6442450944 in0>buf, 6442450944 in1>buf+25769803776;
    AllReduce sum 12884901888 float32 buf>buf;
    unpack float32>float32: 6442450944 buf>out0, 6442450944 buf+25769803776>out1;
    buffer 51539607552
# the root sends bytes, and keeps what is in place
broadcast ranks=3 dtype=float64 counts=3,1 root=2 me=2 inplace=0 ->
    pack int64>int64: 3 in0>buf, 1 in1>buf+32; Broadcast rank 2 40 uint8 buf>buf;
    unpack int64>int64: 1 buf+32>out1; buffer 40
# others unpack all
broadcast ranks=3 dtype=float64 counts=3,1 root=2 -> Broadcast rank 2 40 uint8 buf>buf;
    unpack int64>int64: 3 buf>out0, 1 buf+32>out1; buffer 40
# one tensor goes straight; NCCL writes nothing at the root
broadcast drop=0 -> Broadcast rank 0 20 uint8 in0>in0
broadcast inplace=0 -> Broadcast rank 0 20 uint8 in0>in0
broadcast me=1 -> Broadcast rank 0 20 uint8 out0>out0; unpack int32>int32: 5 out0>out0
# what is dropped is received in the buffer
broadcast me=1 drop=0 -> Broadcast rank 0 20 uint8 buf>buf; buffer 20
# equal parts are gathered as bytes where they are, without cast or factor
allgather parts=3,3 me=1 wire=float16 pre=2 -> AllGather 12 uint8 in0>out0;
    unpack int32>int32: 6 out0>out0
# each part that has elements is broadcast where parts differ
allgather parts=2,0,3 me=2 -> Broadcast rank 0 8 uint8 out0>out0;
    Broadcast rank 2 12 uint8 in0>out0+8; unpack int32>int32: 5 out0>out0
# what is dropped is received in the buffer
allgather parts=2,2 drop=0 -> AllGather 8 uint8 in0>buf; buffer 16
# also where a rank joined
allgather parts=0,2 absent drop=0 -> Broadcast rank 1 8 uint8 buf>buf; buffer 8
# nothing is called for no elements
allgather parts=0,0 -> nothing
# equal parts are reduced where they are
reducescatter parts=3,3 me=1 -> ReduceScatter sum 3 float32 in0>out0;
    unpack int32>int32: 3 out0>out0
# the count is the same where this rank alone multiplies
reducescatter parts=3,3 me=1 pre=0.5 -> pack float32>float32 *0.5: 3 in0>buf, 3 in0+12>buf+12;
    ReduceScatter sum 3 float32 buf>buf+12; unpack float32>float32: 3 buf+12>out0; buffer 24
reducescatter parts=3,4 me=1 -> pack float32>float32: 3 in0>buf, 4 in0+12>buf+16;
    ReduceScatter sum 4 float32 buf>buf+16; unpack float32>float32: 4 buf+16>out0; buffer 32
reducescatter parts=3,4 me=1 pre=0.5 -> pack float32>float32 *0.5: 3 in0>buf, 4 in0+12>buf+16;
    ReduceScatter sum 4 float32 buf>buf+16; unpack float32>float32: 4 buf+16>out0; buffer 32
# parts that differ are packed as long as the longest, which 16 bytes divide
reducescatter parts=6,5,0 me=1 ->
    pack float32>float32: 6 in0>buf, 5 in0+24>buf+32, 0 in0+44>buf+64;
    ReduceScatter sum 8 float32 buf>buf+32; unpack float32>float32: 5 buf+32>out0; buffer 96
# nothing is taken home where the own part is empty
reducescatter parts=6,5,0 me=2 ->
    pack float32>float32: 6 in0>buf, 5 in0+24>buf+32, 0 in0+44>buf+64;
    ReduceScatter sum 8 float32 buf>buf+64; buffer 96
# the launches around it cast and multiply
reducescatter parts=4,4 me=1 wire=bfloat16 op=average pre=6 post=0.5 ->
    pack float32>bfloat16 *3: 4 in0>buf, 4 in0+16>buf+8; ReduceScatter sum 4 bfloat16 buf>buf+8;
    unpack bfloat16>float32 *0.5: 4 buf+8>out0; buffer 16
# averages as an allreduce's
reducescatter parts=4,4 dtype=float16 op=average -> ReduceScatter avg 4 float16 in0>out0;
    unpack int16>int16: 4 out0>out0
reducescatter parts=4,3 dtype=float16 op=average ->
    pack float16>float16 *0.5: 4 in0>buf, 3 in0+8>buf+16; ReduceScatter sum 8 float16 buf>buf;
    unpack float16>float16: 4 buf>out0; buffer 32
reducescatter parts=4,4 dtype=int8 op=average -> pack int8>int64: 4 in0>buf, 4 in0+4>buf+32;
    ReduceScatter sum 4 int64 buf>buf; unpack int64>int8 /2: 4 buf>out0; buffer 64
# all parts are the identity where a rank is absent
reducescatter parts=3,3 me=1 absent -> pack float32>float32: 6 none>buf;
    ReduceScatter sum 3 float32 buf>out0; unpack int32>int32: 3 out0>out0; buffer 24
reducescatter parts=3,2 me=1 absent -> pack float32>float32: 8 none>buf;
    ReduceScatter sum 4 float32 buf>buf+16; unpack float32>float32: 2 buf+16>out0; buffer 32
# what is dropped is received in the buffer
reducescatter parts=3,3 me=1 drop=0 -> ReduceScatter sum 3 float32 in0>buf; buffer 12
# in place, as NCCL understands it, where a rank joined
reducescatter parts=3,3 me=1 absent drop=0 -> pack float32>float32: 6 none>buf;
    ReduceScatter sum 3 float32 buf>buf+12; buffer 24
# nothing is called for no elements
reducescatter parts=0,0 -> nothing
# pieces that have elements are sent and received
alltoall me=1 sends=2,1,0 receives=0,1,5 -> Send rank 0 8 uint8 in0>none;
    Send rank 1 4 uint8 in0+8>none; Recv rank 1 4 uint8 none>out0;
    Recv rank 2 20 uint8 none>out0+4; unpack int32>int32: 6 out0>out0
# nothing is called on a rank that neither sends nor receives, whatever others do
alltoall sends=0,0 receives=0,0 counts=7 -> nothing
# what is dropped is received in the buffer
alltoall sends=0,1 receives=0,3 drop=0 -> Send rank 1 4 uint8 in0>none;
    Recv rank 1 12 uint8 none>buf; buffer 12
# nothing is called for no elements
alltoall sends=0,0 receives=0,0 -> nothing
)";

TEST(PlanNccl, IsThatOfTheTable) {
  std::istringstream lines(std::regex_replace(kPlans, std::regex("\n +"), " "));
  std::string promise;
  for (std::string line; std::getline(lines, line);) {
    const size_t arrow = line.find(" -> ");
    if (line.starts_with("#")) promise = line;
    if (arrow == std::string::npos) continue;
    EXPECT_EQ(PlanOf(BatchInText(line.substr(0, arrow))), line.substr(arrow + 4))
        << line << promise;
  }
}

std::string OneOf(std::mt19937& random, const std::vector<std::string>& words) {
  return words[random() % words.size()];
}

/// What all members know alike, in text.
std::string Draw(std::mt19937& random, bool divides) {
  const size_t size = 2 + random() % (divides ? 3 : 4);
  std::string text = divides ? OneOf(random, {"allgather parts=", "reducescatter parts="})
                             : "allreduce ranks=" + std::to_string(size) + " counts=";
  const size_t numbers = divides ? size : 1 + random() % 3;
  for (size_t i = 0; i < numbers; ++i) text += std::to_string(random() % (divides ? 3 : 9)) + ",";
  const DType dtype = static_cast<DType>(random() % kReducibleDTypeCount);
  const DType wire = WireDType(dtype, static_cast<WireFormat>(random() % 3));
  text += " dtype=" + std::string(Name(dtype)) + " wire=" + std::string(Name(wire));
  text += " op=" + OneOf(random, {"sum", "average", "min", "max", "product"});
  return text + OneOf(random, {"", " pre=0.5"}) + OneOf(random, {"", " post=0.5"});
}

/// What a rank knows alone: where its memory is, and whether there is any.
std::string DrawOwn(std::mt19937& random, const std::string& text) {
  if (text.starts_with("allgather")) return OneOf(random, {"", " drop=0"});
  return OneOf(random, {"", " absent", " absent drop=0", " drop=0", " inplace=0"});
}

TEST(PlanNccl, MakesTheSameCallsOnAllMembersWhateverOneOfThemContributes) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (int round = 0; round < 7000; ++round) {
    const std::string text = Draw(random, /*divides=*/round % 2 == 0);
    const std::string own = " me=1" + DrawOwn(random, text);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << text << ", then" << own);
    const std::vector<NcclCall> a = Plan(BatchInText(text)).calls;
    const std::vector<NcclCall> b = Plan(BatchInText(text + own)).calls;
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].kind, b[i].kind);
      ASSERT_EQ(a[i].type, b[i].type);
      ASSERT_EQ(a[i].op, b[i].op);
      ASSERT_EQ(a[i].count, b[i].count);
      ASSERT_EQ(a[i].peer, b[i].peer);
    }
  }
}

}  // namespace
}  // namespace farandole
