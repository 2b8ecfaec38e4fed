// The C ABI: NULL for every pointer of every function, options of init, and want of memory.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "test/support/count_allocations.h"

namespace {

using ::testing::HasSubstr;

// How many threads can still be started; negative: as many as the system has.
std::atomic<int> threads_left{-1};

/// One rank in this process, with one of each handle.
class CAbi : public ::testing::Test {
 protected:
  CAbi() {
    EXPECT_EQ(farandole_init_in_process(1, &context), FARANDOLE_OK);
    params.struct_size = sizeof params;
    params.kind = FARANDOLE_ALLREDUCE;
    params.op = FARANDOLE_SUM;
    params.prescale = params.postscale = 1;
    params.root = -1;
    rows_params = params;
    rows_params.kind = FARANDOLE_ALLGATHER;
    operation = Prepare(params, "t");
    gathering = Prepare(rows_params, "rows");
    EXPECT_EQ(farandole_start(operation, 0, &in, &out, nullptr, nullptr, &work), FARANDOLE_OK);
    EXPECT_EQ(farandole_wait(work, -1), FARANDOLE_OK);
    EXPECT_EQ(farandole_gradients_create(context, &params, nullptr, &tensor, 1, &gradients),
              FARANDOLE_OK);
  }
  ~CAbi() override {
    farandole_gradients_release(gradients);
    farandole_work_release(work);
    farandole_release(context);
  }

  farandole_operation* Prepare(const farandole_params& what, const char* name) {
    farandole_operation* made = nullptr;
    EXPECT_EQ(farandole_prepare(context, &what, name, &tensor, 1, &made, nullptr), FARANDOLE_OK);
    return made;
  }

  const int64_t count = 4;
  farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_params params{}, rows_params{};
  float data[4] = {1, 2, 3, 4};
  const void* in = data;
  void* out = data;
  const void* no_in = nullptr;
  void* no_out = nullptr;
  const int32_t ranks[1] = {0};
  farandole_context* context = nullptr;
  farandole_operation* operation = nullptr;
  farandole_operation* gathering = nullptr;
  farandole_work* work = nullptr;
  farandole_gradients* gradients = nullptr;

  // Where a call without the NULL would put its results.
  farandole_context* a_context = nullptr;
  farandole_operation* an_operation = nullptr;
  farandole_work* a_work = nullptr;
  farandole_gradients* a_gradients = nullptr;
  farandole_buffer* a_buffer = nullptr;
  int64_t number = 0;
  int32_t rank = 0;
  uint32_t uid = 0;
  const char* text = nullptr;
};

std::set<std::string> ExportedFunctions() {
  const std::string prefix = "farandole_";
  std::set<std::string> names;
  std::ifstream file(FARANDOLE_TEST_SYMBOLS);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find('@');
    if (line.starts_with(prefix) && at != std::string::npos) {
      names.insert(line.substr(prefix.size(), at - prefix.size()));
    }
  }
  return names;
}

/// Expects that functions refuse NULL by the name of the pointer, and keeps which were asked.
struct Refusals {
  std::set<std::string> functions;

  void Expect(const std::string& function, const std::string& pointer, int code) {
    SCOPED_TRACE("farandole_" + function + ", " + pointer + " NULL");
    EXPECT_EQ(code, FARANDOLE_INVALID_ARGUMENT);
    EXPECT_THAT(farandole_last_error(), HasSubstr(pointer));
    functions.insert(function);
  }
  /// Calls with NULL for one pointer after the other, and with `good` values for all else.
  /// @param pointers  A word for each parameter, as in the error message; "-": no pointer, or one
  ///                  that may be NULL.
  template <class... Parameters>
  void Try(const std::string& function, int (*call)(Parameters...), const std::string& pointers,
           std::type_identity_t<Parameters>... good) {
    std::istringstream words(pointers);
    size_t null = 0;
    for (std::string word; words >> word; ++null) {
      if (word == "-") continue;
      std::tuple<Parameters...> given{good...};
      auto clear = [&, at = size_t{0}](auto& value) mutable {
        if constexpr (std::is_pointer_v<std::remove_reference_t<decltype(value)>>) {
          if (at == null) value = nullptr;
        }
        ++at;
      };
      std::apply([&](auto&... value) { (clear(value), ...); }, given);
      Expect(function, word, std::apply(call, given));
    }
    EXPECT_EQ(null, sizeof...(Parameters)) << function;
  }
};

// A row for each function. Those that give no error code, or have no pointer that must not be
// NULL, are below.
TEST_F(CAbi, RefusesNullByTheNameOfThePointer) {
  int32_t due = 0;
  uint64_t generation = 0;
  const char* members = nullptr;
  int64_t rounds = 0;
  farandole_round_status status{};
  status.struct_size = sizeof status;
  float results[4] = {};
  const farandole_output no_place = {nullptr, sizeof results, nullptr};
  farandole_stream stream{};
  stream.struct_size = sizeof stream;
  farandole_allocator allocator{};
  allocator.struct_size = sizeof allocator;
  farandole_tensor no_shape = tensor;
  no_shape.shape = nullptr;
  farandole_topology topology;
  farandole_failure failure{};
  failure.struct_size = sizeof failure;
  Refusals all;
  all.Try("last_failure", farandole_last_failure, "out", &failure);
  all.Try("init", farandole_init, "- out", nullptr, &a_context);
  all.Try("init_for", farandole_init_for, "- - context", nullptr, 0, &a_context);
  all.Try("init_in_process", farandole_init_in_process, "- out", 1, &a_context);
  all.Try("reinit", farandole_reinit, "old - next", context, nullptr, &a_context);
  all.Try("generation_number", farandole_generation_number, "context number", context, &generation);
  all.Try("change_is_due", farandole_change_is_due, "context is_due", context, &due);
  all.Try("members", farandole_members, "context - members", context, -1, &members);
  all.Try("shutdown", farandole_shutdown, "context", context);
  all.Try("shutdown_for", farandole_shutdown_for, "context -", context, 0);
  all.Try("leave_at_exit", farandole_leave_at_exit, "context - - -", context, 0, nullptr, 0);
  all.Try("get_topology", farandole_get_topology, "context out", context, &topology);
  all.Try("slot_range", farandole_slot_range, "context begin end", context, &rank, &rank);
  all.Try("check", farandole_check, "context", context);
  all.Try(
      "when_finished", farandole_when_finished, "work call -", work, [](void*, int) {}, nullptr);
  all.Try("prepare", farandole_prepare, "context params - tensors - out -", context, &params, "n",
          &tensor, 1, &an_operation, nullptr);
  all.Expect("prepare", "shape",
             farandole_prepare(context, &params, "n", &no_shape, 1, &an_operation, nullptr));
  farandole_request request{};
  request.struct_size = sizeof request;
  request.in = &in;
  request.out = &out;
  all.Try("start_request", farandole_start_request, "operation request work", operation, &request,
          &a_work);
  all.Try("run_request", farandole_run_request, "operation request - work", operation, &request, -1,
          &a_work);
  all.Expect("start_request", "in",
             farandole_start(operation, 0, nullptr, &out, nullptr, nullptr, &a_work));
  all.Expect("start_request", "out",
             farandole_start(operation, 0, &in, nullptr, nullptr, nullptr, &a_work));
  all.Expect("start_request", "no input",
             farandole_start(operation, 0, &no_in, &out, nullptr, nullptr, &a_work));
  all.Expect("start_request", "no output",
             farandole_start(operation, 0, &in, &no_out, nullptr, nullptr, &a_work));
  all.Expect("start_request", "in",
             farandole_start_allocating(gathering, 0, nullptr, nullptr, nullptr, &a_work));
  all.Expect("start_request", "no input",
             farandole_start_allocating(gathering, 0, &no_in, nullptr, nullptr, &a_work));
  all.Expect("start_request", "allocate",
             farandole_start_allocating(gathering, 0, &in, &allocator, nullptr, &a_work));
  all.Expect("start_request", "out",
             farandole_start_into(gathering, 0, &in, nullptr, nullptr, &a_work));
  all.Expect("start_request", "no address",
             farandole_start_into(gathering, 0, &in, &no_place, nullptr, &a_work));
  all.Expect("run_request", "in", farandole_run(operation, 0, nullptr, &out, -1, &a_work));
  all.Expect("run_request", "out", farandole_run(operation, 0, &in, nullptr, -1, &a_work));
  all.Expect("run_request", "no output", farandole_run(operation, 0, &in, &no_out, -1, &a_work));
  all.Expect("run_request", "no address",
             farandole_run_into(operation, 0, &in, &no_place, -1, &a_work));
  all.Try("output_rows", farandole_output_rows, "context - - - out", context, FARANDOLE_ALLGATHER,
          0, 1, &number);
  all.Try("received_rows", farandole_received_rows, "work - rows -", work, 0, &number, 1);
  all.Try("take_result", farandole_take_result, "work - result", work, 0, &a_buffer);
  all.Try("buffer_allocate", farandole_buffer_allocate, "context - out", context, 1, &a_buffer);
  all.Try("wait_on", farandole_wait_on, "work stream -", work, &stream, 0);
  all.Try("is_complete", farandole_is_complete, "work", work);
  all.Try("wait", farandole_wait, "work -", work, 0);
  all.Try("set_timeout", farandole_set_timeout, "context -", context, 0);
  all.Try("join", farandole_join, "context - last_rank", context, 0, &rank);
  all.Try("set_add", farandole_set_add, "context pointer - work", context, ranks, 1, &a_work);
  all.Try("set_find", farandole_set_find, "context pointer - uid", context, ranks, 1, &uid);
  all.Try("set_remove", farandole_set_remove, "context - work", context, 1, &a_work);
  all.Try("gradients_create", farandole_gradients_create, "context params - tensors - out", context,
          &params, nullptr, &tensor, 1, &a_gradients);
  all.Expect("gradients_create", "shape",
             farandole_gradients_create(context, &params, nullptr, &no_shape, 1, &a_gradients));
  all.Try("gradients_redefine", farandole_gradients_redefine, "gradients tensors - -", gradients,
          &tensor, 1, FARANDOLE_CPU);
  all.Expect("gradients_redefine", "shape",
             farandole_gradients_redefine(gradients, &no_shape, 1, FARANDOLE_CPU));
  all.Try("gradients_rebind", farandole_gradients_rebind, "gradients - - - -", gradients, context,
          0, nullptr, 0);
  all.Try("gradients_set_passes", farandole_gradients_set_passes, "gradients -", gradients, 1);
  all.Try("gradients_note_failure", farandole_gradients_note_failure, "gradients -", gradients,
          nullptr);
  all.Try("gradients_forget", farandole_gradients_forget, "gradients", gradients);
  all.Try("gradients_complete", farandole_gradients_complete, "gradients rounds", gradients,
          &rounds);
  all.Try("gradients_add", farandole_gradients_add, "gradients tensors -", gradients, &tensor, 1);
  all.Try("gradients_count_pass", farandole_gradients_count_pass, "gradients -", gradients, 0);
  all.Try("gradients_open", farandole_gradients_open, "gradients", gradients);
  all.Try("gradients_accumulated", farandole_gradients_accumulated, "gradients - due", gradients, 0,
          &due);
  all.Try("gradients_mark", farandole_gradients_mark, "gradients - - - - -", gradients, 0, data,
          data, FARANDOLE_PRESENT, nullptr);
  all.Try("gradients_raise_flag", farandole_gradients_raise_flag, "gradients", gradients);
  all.Try("gradients_compare", farandole_gradients_compare, "gradients -", gradients, 0);
  all.Try("gradients_end", farandole_gradients_end, "gradients -", gradients, nullptr);
  all.Try("gradients_wait", farandole_gradients_wait, "gradients - -", gradients, nullptr, 0);
  all.Try("gradients_stepped", farandole_gradients_stepped, "gradients", gradients);
  all.Try("gradients_status", farandole_gradients_status, "gradients status", gradients, &status);
  all.Try("gradients_take_result", farandole_gradients_take_result, "gradients - result", gradients,
          0, &a_buffer);
  all.Try("timeline_start", farandole_timeline_start, "context path -", context, "p", 0);
  all.Try("timeline_stop", farandole_timeline_stop, "context", context);
  all.Try("get_setting", farandole_get_setting, "context name value", context, "FARANDOLE_WINDOW",
          &text);
  const char* name = nullptr;
  const char* initial = nullptr;
  all.Try("setting_at", farandole_setting_at, "context - name value initial", context, 0, &name,
          &text, &initial);
  EXPECT_EQ(farandole_setting_at(context, 1 << 20, &name, &text, &initial), FARANDOLE_OK);
  EXPECT_EQ(name, nullptr);
  uint8_t digest[32] = {};
  all.Try("sha256", farandole_sha256, "data - digest", "abc", size_t{3}, digest);
  EXPECT_EQ(farandole_sha256("abc", 3, digest), FARANDOLE_OK);
  EXPECT_EQ(digest[0] << 8 | digest[31], 0xbaad);  // FIPS 180-4's first example
  // Without an error code, or without a pointer.
  all.functions.insert({"version",
                        "abi_version",
                        "last_error",
                        "release",
                        "buffer_data",
                        "buffer_bytes",
                        "buffer_release",
                        "poll",
                        "skipped",
                        "work_release",
                        "gradients_marked",
                        "gradients_skipped",
                        "counters",
                        "gradients_release",
                        "gradients_next",
                        "operation_release",
                        "wait_in_slices",
                        "leave_thread",
                        "count_waiting_threads",
                        "describe_with",
                        "note_time",
                        "end_step"});
  EXPECT_EQ(all.functions, ExportedFunctions());
  // The operation is as it was.
  EXPECT_EQ(farandole_run(operation, 0, &in, &out, -1, &a_work), FARANDOLE_OK);
}

TEST_F(CAbi, AsksNothingOfANullHandle) {
  farandole_release(nullptr);
  farandole_work_release(nullptr);
  farandole_operation_release(nullptr);
  farandole_buffer_release(nullptr);
  farandole_gradients_release(nullptr);
  EXPECT_EQ(farandole_buffer_data(nullptr), nullptr);
  EXPECT_EQ(farandole_buffer_bytes(nullptr), 0);
  EXPECT_EQ(farandole_poll(nullptr), 0);
  EXPECT_EQ(farandole_skipped(nullptr, 0), 0);
  EXPECT_EQ(farandole_gradients_marked(nullptr, 0), 0);
  EXPECT_EQ(farandole_gradients_skipped(nullptr, 0), 0);
  EXPECT_EQ(farandole_gradients_next(nullptr), -1);
  EXPECT_EQ(farandole_counters(nullptr, nullptr, nullptr, 0), 0);
  farandole_end_step(nullptr);
}

TEST_F(CAbi, GivesCountersIntoTheArraysThatThereAre) {
  const int32_t all = farandole_counters(context, nullptr, nullptr, 0);
  std::vector<const char*> names(static_cast<size_t>(all));
  std::vector<int64_t> values(static_cast<size_t>(all), -1);
  EXPECT_EQ(farandole_counters(context, nullptr, nullptr, all), all);
  EXPECT_EQ(farandole_counters(context, names.data(), nullptr, all), all);
  EXPECT_EQ(farandole_counters(context, nullptr, values.data(), all), all);
  EXPECT_STRNE(names.back(), nullptr);
  EXPECT_GE(values.back(), 0);
}

TEST_F(CAbi, AbsentTensorsNeedNoMemory) {
  const uint8_t absent = FARANDOLE_ABSENT;
  EXPECT_EQ(farandole_start(operation, 0, &no_in, &no_out, &absent, nullptr, &a_work),
            FARANDOLE_OK);
  EXPECT_EQ(farandole_wait(a_work, -1), FARANDOLE_OK);
  EXPECT_EQ(farandole_skipped(a_work, 0), 1);
  farandole_work_release(a_work);
}

TEST_F(CAbi, WritesResultsIntoMemoryWhoseSizeIsGiven) {
  float results[4] = {};
  const int64_t rows = 4;
  const farandole_output place = {results, sizeof results, &rows};
  ASSERT_EQ(farandole_start_into(gathering, 0, &in, &place, nullptr, &a_work), FARANDOLE_OK);
  EXPECT_EQ(farandole_wait(a_work, -1), FARANDOLE_OK);
  EXPECT_THAT(results, testing::ElementsAre(1, 2, 3, 4));
  int64_t received = 0;
  EXPECT_EQ(farandole_received_rows(a_work, 0, &received, 1), FARANDOLE_OK);
  EXPECT_EQ(received, 4);
  farandole_work_release(a_work);
  float sums[4] = {};
  const farandole_output sum = {sums, sizeof sums, nullptr};
  EXPECT_EQ(farandole_run_into(operation, 0, &in, &sum, -1, &a_work), FARANDOLE_OK);
  EXPECT_THAT(sums, testing::ElementsAre(1, 2, 3, 4));
}

// The memory behind the output is poisoned where the address sanitizer builds this.
TEST_F(CAbi, WritesNothingWhereMoreOrFewerRowsComeThanAnOutputIsFor) {
  for (const int64_t floats : {0, 3, 5}) {
    std::vector<float> results(static_cast<size_t>(floats), -1);
    const farandole_output place = {results.data(), floats * 4, nullptr};
    EXPECT_EQ(farandole_run_into(gathering, 0, &in, &place, -1, &a_work), FARANDOLE_MISMATCH);
    EXPECT_THAT(farandole_last_error(),
                HasSubstr("is of shape [" + std::to_string(floats) +
                          "]; rows [4] came from the ranks, which are of shape [4]"));
    EXPECT_THAT(results, testing::Each(-1));
  }
}

TEST_F(CAbi, RefusesOutputsThatCannotHoldTheResult) {
  float results[5] = {};
  const int64_t five = 5, negative = -4;
  const struct {
    farandole_operation* started;
    farandole_output out;
    const char* error;
  } cases[] = {
      {gathering, {results, 15, nullptr}, "15 bytes; expected a multiple of the 4 of a row"},
      {gathering, {results, -4, nullptr}, "-4 bytes"},
      {gathering, {results, 16, &five}, "16 bytes; expected the 20 of the rows [5]"},
      {gathering, {results, 16, &negative}, "-4"},
      {gathering, {data + 1, 12, nullptr}, "in the memory of its input"},
      {gathering, {data, 16, nullptr}, "in the memory of its input"},
      {operation, {results, 20, nullptr}, "20 bytes; expected the 16 of the result"},
      {operation, {results, 12, nullptr}, "12 bytes; expected the 16 of the result"},
      {operation, {results, 16, &count}, "expected NULL"},
      {operation, {data + 1, 16, nullptr}, "in the memory of its input"},
  };
  for (const auto& one : cases) {
    EXPECT_EQ(farandole_run_into(one.started, 0, &in, &one.out, -1, &a_work),
              FARANDOLE_INVALID_ARGUMENT);
    EXPECT_THAT(farandole_last_error(), HasSubstr(one.error));
  }
  const farandole_output in_place = {data, sizeof data, nullptr};
  EXPECT_EQ(farandole_run_into(operation, 0, &in, &in_place, -1, &a_work), FARANDOLE_OK);
}

TEST_F(CAbi, RefusesRequestsWhoseResultsGoToSeveralPlacesOrWouldBeLost) {
  farandole_request twice{}, kept{};
  twice.struct_size = kept.struct_size = sizeof kept;
  twice.in_library = kept.in_library = 1;
  twice.in = kept.in = &in;
  twice.out = &out;
  EXPECT_EQ(farandole_start_request(gathering, &twice, &a_work), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("its results go to 2 places"));
  EXPECT_EQ(farandole_run_request(gathering, &kept, -1, &a_work), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("expected farandole_start_request"));
  EXPECT_EQ(farandole_start_request(operation, &kept, &a_work), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("its results have a size that is known"));
}

TEST_F(CAbi, TheRootOfABroadcastNeedsNoOutput) {
  params.kind = FARANDOLE_BROADCAST;
  params.root = 0;
  farandole_operation* const broadcast = Prepare(params, "b");
  EXPECT_EQ(farandole_run(broadcast, 0, &in, &no_out, -1, &a_work), FARANDOLE_OK);
}

TEST(CAbiWithoutThreads, SaysThatNoThreadCanBeStarted) {
  for (int threads = 0; threads < 2; ++threads) {  // the watchdog's and the engine's
    threads_left = threads;
    farandole_context* context = nullptr;
    const int code = farandole_init_in_process(1, &context);
    threads_left = -1;
    EXPECT_EQ(code, FARANDOLE_RESOURCE_EXHAUSTED);
    EXPECT_EQ(context, nullptr);
    EXPECT_THAT(farandole_last_error(), HasSubstr("a thread cannot be started: Resource temp"));
  }
}

/// A store of this process, which notes whether another thread than that of a rank calls it.
class MapStore {
 public:
  explicit MapStore(std::chrono::milliseconds latency = {}) : latency_(latency) {}
  farandole_store For(std::thread::id caller) {
    const std::lock_guard lock(mutex_);
    users_.push_back({this, caller});
    return {&users_.back(), &Set, &Wait, &Get};
  }
  bool was_called_by_others() const { return was_called_by_others_; }
  size_t size() const { return values_.size(); }

 private:
  struct User {
    MapStore* store;
    std::thread::id caller;
  };
  static std::unique_lock<std::mutex> Enter(void* user) {
    const User& rank = *static_cast<User*>(user);
    std::unique_lock lock(rank.store->mutex_);
    if (rank.caller != std::this_thread::get_id()) rank.store->was_called_by_others_ = true;
    return lock;
  }
  static std::string& Value(void* user, const char* key) {
    return static_cast<User*>(user)->store->values_[key];
  }
  static int Set(void* user, const char* key, const void* value, size_t size) {
    const auto lock = Enter(user);
    Value(user, key) = std::string(static_cast<const char*>(value), size);
    return FARANDOLE_OK;
  }
  static int Wait(void* user, const char* key, double timeout_s) {
    EXPECT_LT(timeout_s, 1);
    const auto lock = Enter(user);
    return Value(user, key).empty() ? FARANDOLE_PENDING : FARANDOLE_OK;
  }
  static int Get(void* user, const char* key, void* value, size_t capacity, size_t* size) {
    const auto lock = Enter(user);
    std::this_thread::sleep_for(static_cast<User*>(user)->store->latency_);
    const std::string& found = Value(user, key);
    *size = found.size();
    found.copy(static_cast<char*>(value), capacity);
    return FARANDOLE_OK;
  }

  const std::chrono::milliseconds latency_;  // of Get
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::deque<User> users_;
  bool was_called_by_others_ = false;
};

void JoinTwoRanksBy(MapStore& store) {
  const auto body = [&](const farandole_store& mine, int rank) {
    farandole_init_options options = FARANDOLE_INIT_OPTIONS;
    options.rank = rank;
    options.size = 2;
    options.store = &mine;
    farandole_context* context = nullptr;
    int code = FARANDOLE_PENDING;
    while (code == FARANDOLE_PENDING) code = farandole_init_for(&options, 0.01, &context);
    ASSERT_EQ(code, FARANDOLE_OK) << farandole_last_error();
    farandole_topology topology;
    EXPECT_EQ(farandole_get_topology(context, &topology), FARANDOLE_OK);
    EXPECT_EQ(topology.rank, rank);
    EXPECT_EQ(topology.size, 2);
    EXPECT_EQ(farandole_shutdown(context), FARANDOLE_OK) << farandole_last_error();
    farandole_release(context);
  };
  std::thread other([&] { body(store.For(std::this_thread::get_id()), 1); });
  body(store.For(std::this_thread::get_id()), 0);
  other.join();
}

TEST(InitOptions, JoinRanksOverTcpByAStoreThatOnlyTheThreadInInitCalls) {
  MapStore store;
  JoinTwoRanksBy(store);
  EXPECT_GT(store.size(), 0u);
  EXPECT_FALSE(store.was_called_by_others());
}

TEST(InitOptions, JoinRanksByAStoreFarAway) {
  MapStore store(std::chrono::milliseconds(120));
  JoinTwoRanksBy(store);
}

TEST(InitOptions, SaysWhatIsWrongWithThem) {
  farandole_context* context = nullptr;
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  options.struct_size = 8;
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("farandole_init_options"));
  options = FARANDOLE_INIT_OPTIONS;
  options.rank = 0;
  options.size = 2;
  const farandole_store no_functions{};
  options.store = &no_functions;
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("set, wait and get"));
  options.store = nullptr;
  options.address = "junk";
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("\"junk\" is not host:port"));
  options.timeout_s = -1;
  EXPECT_EQ(farandole_init(&options, &context), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("timeout_s"));
  EXPECT_EQ(context, nullptr);
}

TEST_F(CAbi, RefusesFloatsOnAGpuInAJobWithSlots) {
  int begin = -1, end = -1;
  EXPECT_EQ(farandole_slot_range(context, &begin, &end), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("no slots"));
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  options.slots = 6;
  farandole_context* job = nullptr;
  ASSERT_EQ(farandole_init(&options, &job), FARANDOLE_OK) << farandole_last_error();
  EXPECT_EQ(farandole_slot_range(job, &begin, &end), FARANDOLE_OK);
  EXPECT_EQ(std::pair(begin, end), std::pair(0, 6));
  params.device = FARANDOLE_CUDA;
  EXPECT_EQ(farandole_prepare(job, &params, "t", &tensor, 1, &an_operation, nullptr),
            FARANDOLE_UNIMPLEMENTED);
  EXPECT_THAT(farandole_last_error(), HasSubstr("in a job with 6 slots: floats on a GPU"));
  params.op = FARANDOLE_MAX;
  EXPECT_EQ(farandole_prepare(job, &params, "t", &tensor, 1, &an_operation, nullptr), FARANDOLE_OK)
      << farandole_last_error();
  farandole_operation_release(an_operation);
  EXPECT_EQ(farandole_shutdown(job), FARANDOLE_OK);
  farandole_release(job);
}

// The last one of its job agrees with nobody: what it has to do follows at once.
TEST(Elastic, GoesOnAloneAtOnceUntilItLeaves) {
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  options.is_elastic = 1;
  int report[2];
  ASSERT_EQ(pipe(report), 0);
  setenv("_FARANDOLE_REPORT", ("/proc/self/fd/" + std::to_string(report[1])).c_str(), 1);
  farandole_context* job = nullptr;
  ASSERT_EQ(farandole_init(&options, &job), FARANDOLE_OK) << farandole_last_error();
  unsetenv("_FARANDOLE_REPORT");
  close(report[1]);
  const char* members = nullptr;
  EXPECT_EQ(farandole_members(job, 0, &members), FARANDOLE_OK);
  std::string told(200, '\0');
  told.resize(static_cast<size_t>(std::max<ssize_t>(read(report[0], told.data(), told.size()), 0)));
  close(report[0]);
  EXPECT_EQ(told, std::string("{\"member\": \"") + members + "\"}\n");
  farandole_context* next = nullptr;
  auto fastest = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < 10; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_EQ(farandole_reinit(job, nullptr, &next), FARANDOLE_OK) << farandole_last_error();
    fastest = std::min(fastest, std::chrono::steady_clock::now() - begin);
    farandole_release(std::exchange(job, std::exchange(next, nullptr)));
  }
  EXPECT_LT(fastest, std::chrono::milliseconds(50));
  EXPECT_EQ(farandole_shutdown(job), FARANDOLE_OK);
  EXPECT_EQ(farandole_reinit(job, nullptr, &next), FARANDOLE_INVALID_ARGUMENT);
  EXPECT_THAT(farandole_last_error(), HasSubstr("has left the job"));
  farandole_release(job);
}

// Each allocation of this thread, by turns, from the first call to the last.
TEST(CAbiWithoutMemory, FailsAndThrowsNothing) {
  const int64_t count = 4;
  const farandole_tensor tensor = {nullptr, FARANDOLE_FLOAT32, 1, &count};
  farandole_params params{};
  params.struct_size = sizeof params;
  params.kind = FARANDOLE_ALLREDUCE;
  params.op = FARANDOLE_SUM;
  params.prescale = params.postscale = 1;
  params.root = -1;
  float data[4] = {};
  const void* in = data;
  void* out = data;
  farandole_context* context = nullptr;
  ASSERT_EQ(farandole_init_in_process(1, &context), FARANDOLE_OK);
  int failures = 0;
  bool is_reached = true;
  for (int64_t nth = 1; is_reached; ++nth) {
    const std::string name = "a tensor with a long name, number " + std::to_string(nth);
    farandole_operation* operation = nullptr;
    farandole_work* work = nullptr;
    const auto start = [&] {
      const int prepared =
          farandole_prepare(context, &params, name.c_str(), &tensor, 1, &operation, nullptr);
      if (prepared != FARANDOLE_OK) return prepared;
      return farandole_start(operation, 0, &in, &out, nullptr, nullptr, &work);
    };
    int code = FARANDOLE_OK;
    {
      const farandole::FailAllocation failure(nth);
      code = start();
      is_reached = failure.has_failed();
    }
    if (is_reached) {
      EXPECT_EQ(code, FARANDOLE_RESOURCE_EXHAUSTED) << "allocation " << nth;
      EXPECT_STREQ(farandole_last_error(), "out of memory");
      ++failures;
      code = start();  // what has failed holds nothing back
    }
    EXPECT_EQ(code, FARANDOLE_OK) << "allocation " << nth << ": " << farandole_last_error();
    EXPECT_EQ(farandole_wait(work, -1), FARANDOLE_OK) << farandole_last_error();
    farandole_work_release(work);
  }
  EXPECT_GT(failures, 3);
  farandole_release(context);
}

}  // namespace

// In place of the C library's, to run out of threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left.load() == 0) return EAGAIN;
  if (threads_left.load() > 0) --threads_left;
  return real(thread, attributes, body, argument);
}
