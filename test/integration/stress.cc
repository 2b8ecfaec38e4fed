// Thousands of collectives in another order on every rank: every result right, every work finished
// once.
//
// `stress in_process N [SUBMISSIONS]` runs N ranks as threads of this process; `stress job 0
// [SUBMISSIONS]` is one rank of the job mpirun started. Speaks the C ABI only. Contributions are
// small integers chosen so that every result is exact in every dtype.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "bindings/c/farandole.h"
#include "core/half.h"

namespace {

constexpr int kSubmissions = 10'000;
constexpr size_t kWindow = 256;
constexpr int64_t kInFlightBytes = int64_t{64} << 20;
constexpr int kPeriod = 9;  // contributions repeat after so many elements

struct Item {
  std::string name;
  farandole_kind kind;
  farandole_op op;
  farandole_dtype dtype;
  int root;
  int64_t count;
};

int64_t SizeOf(farandole_dtype dtype) {
  constexpr int64_t kSizes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 2, 4, 8, 8, 16, 1, 1};
  return kSizes[dtype];
}

bool Reduces(farandole_kind kind) {
  return kind == FARANDOLE_ALLREDUCE || kind == FARANDOLE_REDUCESCATTER;
}

bool HasAdasum(const Item& item) {
  return item.kind == FARANDOLE_ALLREDUCE && item.dtype >= FARANDOLE_FLOAT16 &&
         item.dtype <= FARANDOLE_FLOAT64;
}

// The same list on every rank. Every 40th name comes back, so that known ids and new names mix.
std::vector<Item> MakeItems(int size, int submissions) {
  std::mt19937_64 random(20'261'121);
  std::uniform_real_distribution<double> log_size(0.0, 20.0);
  std::vector<Item> items;
  for (int i = 0; i < submissions; ++i) {
    Item item;
    const auto kind = static_cast<int>(random() % 16);  // most are allreduces
    item.kind =
        kind <= FARANDOLE_ALLTOALL ? static_cast<farandole_kind>(kind) : FARANDOLE_ALLREDUCE;
    const int dtypes = Reduces(item.kind) ? FARANDOLE_FLOAT64 + 1 : FARANDOLE_FLOAT8_E5M2 + 1;
    item.dtype = static_cast<farandole_dtype>(random() % static_cast<unsigned>(dtypes));
    item.op = static_cast<farandole_op>(random() % (FARANDOLE_ADASUM + 1));
    if (item.op == FARANDOLE_ADASUM && !HasAdasum(item)) item.op = FARANDOLE_MAX;
    const bool sums = item.op < FARANDOLE_MIN || item.op == FARANDOLE_PREMUL_SUM;
    const bool bitwise = item.op > FARANDOLE_PRODUCT && item.op < FARANDOLE_PREMUL_SUM;
    if (item.dtype == FARANDOLE_BOOL && sums) item.op = FARANDOLE_MAX;
    if (item.dtype >= FARANDOLE_FLOAT16 && bitwise) item.op = FARANDOLE_MIN;
    item.root = item.kind == FARANDOLE_BROADCAST
                    ? static_cast<int>(random() % static_cast<unsigned>(size))
                    : -1;
    item.count = static_cast<int64_t>(std::exp2(log_size(random))) - 1;
    const int slot = i % 2 == 0 ? i : i % 2'000;
    item.name = "tensor " + std::to_string(slot) + " of kind " + std::to_string(item.kind);
    items.push_back(item);
  }
  return items;
}

bool IsUnsigned(farandole_dtype dtype) {
  return dtype == FARANDOLE_UINT8 || dtype == FARANDOLE_BOOL;
}

// What `rank` contributes at an element whose index is `phase` modulo kPeriod. A multiple of `size`
// for sums, so that averages are exact; 1 or 2 for products. Adasum: half of the tensors are the
// same on every rank, and stay; the others have no element on which two ranks are not 0, and add
// up.
int Contribution(const Item& item, int phase, int rank, int size) {
  if (item.op == FARANDOLE_ADASUM) {
    return item.count % 2 == 0 || phase % size == rank ? phase - 4 : 0;
  }
  const int k = (phase * 3 + rank * 5 + static_cast<int>(item.count % 7)) % kPeriod;
  if (item.dtype == FARANDOLE_BOOL) return k % 2;
  if (item.op == FARANDOLE_PRODUCT) return 1 + k % 2;
  return size * (IsUnsigned(item.dtype) ? k / 2 : k - 4);
}

// A rank's own.
int FactorOf(const Item& item, int rank) {
  return item.op == FARANDOLE_PREMUL_SUM ? 1 + rank % 2 : 1;
}

int Expected(const Item& item, int phase, int size) {
  if (item.kind == FARANDOLE_BROADCAST) return Contribution(item, phase, item.root, size);
  if (item.op == FARANDOLE_ADASUM) return phase - 4;  // of equal ones, and of the sum of the others
  int result = Contribution(item, phase, 0, size);
  for (int rank = 1; rank < size; ++rank) {
    const int value = FactorOf(item, rank) * Contribution(item, phase, rank, size);
    switch (item.op) {
      case FARANDOLE_SUM:
      case FARANDOLE_AVERAGE:
      case FARANDOLE_PREMUL_SUM:
        result += value;
        break;
      case FARANDOLE_MIN:
        result = std::min(result, value);
        break;
      case FARANDOLE_MAX:
        result = std::max(result, value);
        break;
      case FARANDOLE_PRODUCT:
        result *= value;
        break;
      case FARANDOLE_BIT_AND:
        result &= value;
        break;
      case FARANDOLE_BIT_OR:
        result |= value;
        break;
      case FARANDOLE_BIT_XOR:
        result ^= value;
        break;
      case FARANDOLE_ADASUM:
        break;
    }
  }
  return item.op == FARANDOLE_AVERAGE ? result / size : result;
}

template <class T>
void Append(std::vector<std::byte>& bytes, T value) {
  const auto* first = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof(T));
}

void AppendAs(farandole_dtype dtype, int value, std::vector<std::byte>& bytes) {
  switch (dtype) {
    case FARANDOLE_BOOL:
    case FARANDOLE_UINT8:
      return Append(bytes, static_cast<uint8_t>(value));
    case FARANDOLE_INT8:
      return Append(bytes, static_cast<int8_t>(value));
    case FARANDOLE_INT16:
      return Append(bytes, static_cast<int16_t>(value));
    case FARANDOLE_INT32:
      return Append(bytes, static_cast<int32_t>(value));
    case FARANDOLE_INT64:
      return Append(bytes, static_cast<int64_t>(value));
    case FARANDOLE_FLOAT16:
      return Append(bytes, farandole::ToFloat16(static_cast<float>(value)));
    case FARANDOLE_BFLOAT16:
      return Append(bytes, farandole::ToBfloat16(static_cast<float>(value)));
    case FARANDOLE_FLOAT32:
      return Append(bytes, static_cast<float>(value));
    case FARANDOLE_FLOAT64:
      return Append(bytes, static_cast<double>(value));
    // What is only moved has any bits.
    case FARANDOLE_UINT16:
      return Append(bytes, static_cast<uint16_t>(value));
    case FARANDOLE_UINT32:
      return Append(bytes, static_cast<uint32_t>(value));
    case FARANDOLE_UINT64:
      return Append(bytes, static_cast<uint64_t>(static_cast<int64_t>(value)) << 40);
    case FARANDOLE_COMPLEX64:
      return Append(bytes, std::complex<float>(static_cast<float>(value), 0.5f));
    case FARANDOLE_COMPLEX128:
      return Append(bytes, std::complex<double>(0.5, value));
    case FARANDOLE_FLOAT8_E4M3FN:
    case FARANDOLE_FLOAT8_E5M2:
      return Append(bytes, static_cast<uint8_t>(value + 128));
  }
}

// `count` elements with the given value at each phase.
std::vector<std::byte> Fill(const Item& item, int64_t count,
                            const std::function<int(int)>& value_at) {
  std::vector<std::byte> period;
  for (int phase = 0; phase < kPeriod; ++phase) AppendAs(item.dtype, value_at(phase), period);
  std::vector<std::byte> data(static_cast<size_t>(count * SizeOf(item.dtype)));
  for (size_t at = 0; at < data.size(); at += period.size()) {
    std::memcpy(data.data() + at, period.data(), std::min(period.size(), data.size() - at));
  }
  return data;
}

// Allgather: elements of each rank, unlike each other, item.count together. Reducescatter: those
// each rank gets.
int64_t PartOf(const Item& item, int rank, int size) {
  const int64_t even = item.count / size;
  if (item.kind == FARANDOLE_REDUCESCATTER) return even + (rank < item.count % size ? 1 : 0);
  const int64_t first = even / 2 + (size == 1 ? item.count - even / 2 : 0);
  if (rank == 0) return first;
  return rank + 1 < size ? even : item.count - first - even * (size - 2);
}

// Alltoall: elements from one rank to another, at most item.count.
int64_t PieceOf(const Item& item, int from, int to) {
  return item.count * ((from + 2 * to) % 3) / 2;
}

// What `rank` gives, and what it is to get.
class Exchange {
 public:
  Exchange(const Item& item, int rank, int size) : item_(item), rank_(rank), size_(size) {}

  /// Of this rank's tensor, which has one dimension.
  int64_t Rows() const {
    if (item_.kind == FARANDOLE_ALLGATHER) return PartOf(item_, rank_, size_);
    return item_.kind == FARANDOLE_ALLTOALL ? Before(rank_, size_) : item_.count;
  }

  std::vector<int64_t> Splits() const {
    std::vector<int64_t> splits;
    for (int r = 0; r < size_; ++r) splits.push_back(PieceOf(item_, rank_, r));
    return splits;
  }

  std::vector<std::byte> Given() const { return GivenBy(rank_, Rows()); }

  std::vector<std::byte> Wanted() const {
    std::vector<std::byte> wanted;
    if (item_.kind != FARANDOLE_ALLGATHER && item_.kind != FARANDOLE_ALLTOALL) {
      wanted = Fill(item_, item_.count, [&](int phase) { return Expected(item_, phase, size_); });
      if (item_.kind != FARANDOLE_REDUCESCATTER) return wanted;
      int64_t first = 0;
      for (int r = 0; r < rank_; ++r) first += PartOf(item_, r, size_);
      return Slice(wanted, first, PartOf(item_, rank_, size_));
    }
    for (int r = 0; r < size_; ++r) {
      const bool gathers = item_.kind == FARANDOLE_ALLGATHER;
      const int64_t first = gathers ? 0 : Before(r, rank_);
      const int64_t count = gathers ? PartOf(item_, r, size_) : PieceOf(item_, r, rank_);
      const std::vector<std::byte> piece = Slice(GivenBy(r, first + count), first, count);
      wanted.insert(wanted.end(), piece.begin(), piece.end());
    }
    return wanted;
  }

 private:
  // Elements that `from` sends to the ranks before `to`.
  int64_t Before(int from, int to) const {
    int64_t count = 0;
    for (int r = 0; r < to; ++r) count += PieceOf(item_, from, r);
    return count;
  }
  std::vector<std::byte> GivenBy(int rank, int64_t count) const {
    return Fill(item_, count, [&](int phase) { return Contribution(item_, phase, rank, size_); });
  }
  std::vector<std::byte> Slice(const std::vector<std::byte>& data, int64_t first,
                               int64_t count) const {
    const auto begin = data.begin() + first * SizeOf(item_.dtype);
    return {begin, begin + count * SizeOf(item_.dtype)};
  }

  const Item& item_;
  const int rank_;
  const int size_;
};

bool Cuts(farandole_kind kind) { return kind >= FARANDOLE_ALLGATHER && kind <= FARANDOLE_ALLTOALL; }

struct Flight {
  const Item* item = nullptr;
  std::vector<std::byte> data;
  std::vector<std::byte> result;  // of the kinds that are not in place
  farandole_work* work = nullptr;
};

class Rank {
 public:
  Rank(farandole_context* context, const std::vector<Item>& items)
      : context_(context), items_(items) {
    farandole_topology topology{};
    (void)farandole_get_topology(context, &topology);
    rank_ = topology.rank;
    size_ = topology.size;
  }

  bool Run() {
    std::mt19937_64 order(static_cast<uint64_t>(rank_) + 1);
    for (size_t first = 0; first < items_.size();) {
      const size_t last = WindowEnd(first);
      std::vector<size_t> window;
      for (size_t i = first; i < last; ++i) window.push_back(i);
      std::shuffle(window.begin(), window.end(), order);
      std::vector<Flight> flights(window.size());
      for (size_t k = 0; k < window.size(); ++k) {
        if (!Start(items_[window[k]], flights[k])) return false;
      }
      for (Flight& flight : flights) {
        if (!Finish(flight)) return false;
      }
      first = last;
    }
    return finished_ == items_.size();
  }

 private:
  // Names within a window are distinct, and its tensors take at most 64 MiB.
  size_t WindowEnd(size_t first) const {
    int64_t bytes = 0;
    size_t last = first;
    while (last < items_.size() && last - first < kWindow) {
      bytes += items_[last].count * SizeOf(items_[last].dtype);
      if (last > first && bytes > kInFlightBytes) break;
      ++last;
    }
    return last;
  }

  bool Start(const Item& item, Flight& flight) {
    flight.item = &item;
    const Exchange exchange(item, rank_, size_);
    flight.data = exchange.Given();
    if (item.kind == FARANDOLE_REDUCESCATTER) flight.result.resize(exchange.Wanted().size());
    const std::vector<int64_t> splits = exchange.Splits();
    const int64_t rows = exchange.Rows();
    farandole_params params{};
    params.struct_size = sizeof(params);
    params.kind = item.kind;
    const bool reduces = Reduces(item.kind);
    params.op = reduces ? item.op : FARANDOLE_SUM;
    params.prescale = reduces ? FactorOf(item, rank_) : 1.0;
    params.postscale = 1.0;
    params.root = item.root;
    params.splits = item.kind == FARANDOLE_ALLTOALL ? splits.data() : nullptr;
    const farandole_tensor tensor{nullptr, item.dtype, 1, &rows};
    farandole_operation* operation = nullptr;
    const void* in = flight.data.data();
    void* out = Cuts(item.kind) ? flight.result.data() : flight.data.data();
    if (farandole_prepare(context_, &params, item.name.c_str(), &tensor, 1, &operation, nullptr) ==
            FARANDOLE_OK &&
        StartPrepared(operation, &in, &out, flight) == FARANDOLE_OK) {
      return true;
    }
    return Complain(item, farandole_last_error());
  }

  static int StartPrepared(farandole_operation* operation, const void* const* in, void* const* out,
                           Flight& flight) {
    if (flight.item->kind != FARANDOLE_ALLGATHER && flight.item->kind != FARANDOLE_ALLTOALL)
      return farandole_start(operation, 0, in, out, nullptr, nullptr, &flight.work);
    const farandole_allocator allocator{sizeof(allocator), &flight.result, Allocate};
    return farandole_start_allocating(operation, 0, in, &allocator, nullptr, &flight.work);
  }

  static void* Allocate(void* result, int32_t, const int64_t*, int32_t, int64_t bytes) {
    auto& memory = *static_cast<std::vector<std::byte>*>(result);
    memory.resize(static_cast<size_t>(bytes));
    return memory.data();
  }

  bool Finish(Flight& flight) {
    const Item& item = *flight.item;
    if (farandole_wait(flight.work, 120.0) != FARANDOLE_OK)
      return Complain(item, farandole_last_error());
    if (farandole_poll(flight.work) != 1) return Complain(item, "finished work is pending again");
    farandole_work_release(flight.work);
    ++finished_;
    const std::vector<std::byte>& got = Cuts(item.kind) ? flight.result : flight.data;
    if (got == Exchange(item, rank_, size_).Wanted()) return true;
    return Complain(item, "wrong result");
  }

  bool Complain(const Item& item, const char* what) const {
    std::fprintf(stderr, "rank %d: \"%s\" kind %d op %d dtype %d count %ld: %s\n", rank_,
                 item.name.c_str(), item.kind, item.op, item.dtype, static_cast<long>(item.count),
                 what);
    return false;
  }

  farandole_context* context_;
  const std::vector<Item>& items_;
  int rank_ = 0;
  int size_ = 1;
  size_t finished_ = 0;
};

bool RunAll(std::span<farandole_context* const> contexts, const std::vector<Item>& items) {
  std::vector<std::thread> threads;
  std::vector<int> good(contexts.size());
  for (size_t i = 0; i < contexts.size(); ++i) {
    threads.emplace_back([&, i] {
      good[i] = Rank(contexts[i], items).Run() ? 1 : 0;
      good[i] &= farandole_shutdown(contexts[i]) == FARANDOLE_OK ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (farandole_context* context : contexts) farandole_release(context);
  return std::all_of(good.begin(), good.end(), [](int g) { return g == 1; });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const int size = argc > 2 ? std::atoi(argv[2]) : 1;
  const int submissions = argc > 3 ? std::atoi(argv[3]) : kSubmissions;
  std::vector<farandole_context*> contexts(mode == "in_process" ? static_cast<size_t>(size) : 1);
  const int code = mode == "in_process" ? farandole_init_in_process(size, contexts.data())
                                        : farandole_init(nullptr, contexts.data());
  if (code != FARANDOLE_OK) {
    std::fprintf(stderr, "init: %s\n", farandole_last_error());
    return 1;
  }
  farandole_topology topology{};
  (void)farandole_get_topology(contexts[0], &topology);
  if (!RunAll(contexts, MakeItems(topology.size, submissions))) return 1;
  if (topology.rank == 0)
    std::printf("%d submissions on %d ranks: all right\n", submissions, topology.size);
  return 0;
}
