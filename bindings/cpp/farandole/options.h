/// @file
/// What ranks agree on besides the data of a collective.
#pragma once

#include <farandole/farandole.h>

#include <cstdint>
#include <string>
#include <vector>

namespace farandole {

/// How contributions become one result. The numbers are the C ABI's (`farandole_op`).
enum class Op : std::int32_t {
  sum = FARANDOLE_SUM,
  average =
      FARANDOLE_AVERAGE,  ///< The sum divided by the number of ranks of the set; integers truncate.
  min = FARANDOLE_MIN,
  max = FARANDOLE_MAX,
  product = FARANDOLE_PRODUCT,
  bit_and = FARANDOLE_BIT_AND,  ///< These three: integers, and bool as 0 and 1; factors must be 1.
  bit_or = FARANDOLE_BIT_OR,
  bit_xor = FARANDOLE_BIT_XOR,
  premul_sum = FARANDOLE_PREMUL_SUM,  ///< A sum whose `prescale` each rank chooses for itself.
  /// Of floats in host memory, allreduce only: adds orthogonal tensors, averages parallel ones.
  adasum = FARANDOLE_ADASUM
};

/// The format in which float and double travel; sums are taken in float or wider.
enum class Compression : std::int32_t {
  none = FARANDOLE_WIRE_SAME,
  fp16 = FARANDOLE_WIRE_FLOAT16,  ///< Beyond +-65504: infinity.
  bf16 = FARANDOLE_WIRE_BFLOAT16,
  int8 = FARANDOLE_WIRE_INT8  ///< Between hosts, with error feedback: see farandole_wire.
};

/// Some ranks of a job; a default one stands for all of them.
struct ProcessSet {
  std::uint32_t id = 0;    ///< 0: all ranks.
  std::vector<int> ranks;  ///< Global, ascending; empty for the set of all ranks.
};

/// What Context::init should not take from the launcher.
struct InitOptions {
  int rank = -1;        ///< -1: as the launcher says; so are the two below.
  int size = -1;        ///< With 1, nobody is waited for.
  int local_rank = -1;  ///< Among the ranks of this host.
  /// Where rank 0 listens, "host:port"; or "file:///folder", seen by all ranks and new for each
  /// job; or "env://", for MASTER_ADDR and MASTER_PORT. Empty: as the launcher says.
  std::string address;
  const farandole_store* store = nullptr;  ///< Instead of an address; borrowed for the call.
  bool apart = false;  ///< No launcher is asked: the job may be one of some of a launcher's ranks.
  /// An operation that has waited this long for a rank ends the job. FARANDOLE_STALL_SHUTDOWN_S
  /// overrides it; 0: no limit.
  double timeout_s = 0;
  /// All ranks start their operations in the same order, except those with a function. Ranks that
  /// do not get an error after a second, not only when all their threads wait.
  bool in_order = false;
  /// Parts of each step's work, at least as many as ranks: see farandole_init_options. 0: as
  /// FARANDOLE_SLOTS says, or, apart, none.
  int slots = 0;
  bool is_elastic = false;  ///< As by FARANDOLE_ELASTIC=1: see Context::reinit().
  /// Where ranks of a running elastic job listen, "host:port,...": this process asks them to be let
  /// in. Empty: as FARANDOLE_MEMBERS says.
  std::string members;
};

/// What all ranks must agree on besides the data. Op, factors and compression apply to allreduce
/// and reducescatter; the other collectives copy their data.
struct Options {
  std::string name;        ///< The same on all ranks; empty: matched by the order of unnamed calls.
  Op op = Op::average;     ///< How contributions become one.
  double prescale = 1.0;   ///< Multiplies each contribution. premul_sum: may differ by rank.
  double postscale = 1.0;  ///< Multiplies the result.
  Compression compression = Compression::none;  ///< Of float and double.
  ProcessSet set;                               ///< Whose ranks take part; all by default.
  /// Elements of one row. allgather, reducescatter and alltoall split between rows: set it to a
  /// matrix's number of columns to keep rows whole.
  std::int64_t row = 1;
};

}  // namespace farandole
