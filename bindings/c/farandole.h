/** @file
 * Farandole's C ABI: the only API that libfarandole.so exports. One file: C users include one.
 *
 * Rules. Handles are opaque and created and released in pairs. Every function returning int returns
 * a farandole_code; farandole_last_error() then has the error message for the calling thread.
 * Strings are UTF-8 and NUL-terminated; returned strings stay valid until the next call on the same
 * thread (last_error) or as documented. Structs start with their size so that later versions can
 * append fields. Any thread may call any function unless documented otherwise; nothing here needs
 * MPI, CUDA or Python headers. The library borrows memory of tensors from start until the work has
 * finished. Where a pointer is needed, NULL returns INVALID_ARGUMENT, or 0 from a function without
 * a code.
 *
 * Lifetimes. A context is a rank in one generation of a job: farandole_init begins it, with a fixed
 * number of ranks, farandole_shutdown ends it. Its works, gradients and operations may be released
 * after it, in any order; they name their generation, and until their release it takes a little
 * memory (of 64 ended generations at most: a handle of an older one must not even be released).
 * Once it has ended what they start, or wait for, returns ABORTED, or the error that ended the
 * generation; and GENERATION_ENDED once farandole_init has begun another one. Buffers and results
 * may outlive it, too.
 */
#ifndef FARANDOLE_H_
#define FARANDOLE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The ABI these declarations belong to; compare with farandole_abi_version(). */
#define FARANDOLE_ABI_VERSION 1

#if defined(__GNUC__)
/** Marks what the library exports. */
#define FARANDOLE_API __attribute__((visibility("default")))
#else
#define FARANDOLE_API
#endif

typedef struct farandole_context farandole_context; /**< one rank's engine */
typedef struct farandole_operation
    farandole_operation; /**< a prepared collective: a name and what it reduces */
typedef struct farandole_work farandole_work; /**< one start of an operation */
typedef struct farandole_gradients
    farandole_gradients; /**< the gradients of one optimizer, grouped */

/** How a call ended. */
typedef enum farandole_code {
  FARANDOLE_OK = 0,
  FARANDOLE_INVALID_ARGUMENT = 1,
  FARANDOLE_MISMATCH = 2,    /**< ranks disagree; refused on all of them */
  FARANDOLE_TIMEOUT = 3,     /**< started work made no progress; final */
  FARANDOLE_UNAVAILABLE = 4, /**< a peer is gone; final */
  FARANDOLE_ABORTED =
      5, /**< the process set ended, a rank's backward failed, or the context was shut down */
  FARANDOLE_RESOURCE_EXHAUSTED = 6,
  FARANDOLE_UNIMPLEMENTED = 7,
  FARANDOLE_INTERNAL = 8, /**< final */
  FARANDOLE_PENDING = 9,  /**< farandole_*_wait only: the time given has passed, the work goes on */
  FARANDOLE_GENERATION_ENDED =
      10, /**< a handle from before farandole_shutdown, and farandole_init has joined again */
  FARANDOLE_HALTED =
      11 /**< farandole_reinit only: this process must not go on; it should end with code 75 */
} farandole_code;

/** Numbers of farandole::DType, ReduceOp, OpKind, WireFormat. */
typedef enum farandole_dtype {
  FARANDOLE_BOOL = 0,
  FARANDOLE_UINT8 = 1,
  FARANDOLE_INT8 = 2,
  FARANDOLE_INT16 = 3,
  FARANDOLE_INT32 = 4,
  FARANDOLE_INT64 = 5,
  FARANDOLE_FLOAT16 = 6,
  FARANDOLE_BFLOAT16 = 7,
  FARANDOLE_FLOAT32 = 8,
  FARANDOLE_FLOAT64 = 9,
  FARANDOLE_UINT16 = 10, /**< from here on: broadcast, allgather and alltoall only */
  FARANDOLE_UINT32 = 11,
  FARANDOLE_UINT64 = 12,
  FARANDOLE_COMPLEX64 = 13,  /**< two float32 */
  FARANDOLE_COMPLEX128 = 14, /**< two float64 */
  FARANDOLE_FLOAT8_E4M3FN = 15,
  FARANDOLE_FLOAT8_E5M2 = 16
} farandole_dtype;
/** How contributions become one result. */
typedef enum farandole_op {
  FARANDOLE_SUM = 0,
  FARANDOLE_AVERAGE = 1,
  FARANDOLE_MIN = 2,
  FARANDOLE_MAX = 3,
  FARANDOLE_PRODUCT = 4,
  FARANDOLE_BIT_AND = 5, /**< these three: integers and bool, in host memory; no factors */
  FARANDOLE_BIT_OR = 6,
  FARANDOLE_BIT_XOR = 7,
  FARANDOLE_PREMUL_SUM = 8, /**< a sum whose params.prescale each rank chooses for itself */
  FARANDOLE_ADASUM = 9      /**< an adaptive sum of floats in host memory; allreduce only */
} farandole_op;
/** Which collective. */
typedef enum farandole_kind {
  FARANDOLE_ALLREDUCE = 0,
  FARANDOLE_BROADCAST = 1,
  FARANDOLE_ALLGATHER = 2,
  FARANDOLE_REDUCESCATTER = 3,
  FARANDOLE_ALLTOALL = 4,
  FARANDOLE_BARRIER = 5
} farandole_kind;
/** The format in which float32 and float64 travel. */
typedef enum farandole_wire {
  FARANDOLE_WIRE_SAME = 0,
  FARANDOLE_WIRE_FLOAT16 = 1,
  FARANDOLE_WIRE_BFLOAT16 = 2,
  /** Between hosts, sums and averages of float32 in host memory (allreduce) travel as 8-bit
   * integers, with a scale for each 256 of them. The rounding error is kept under the operation's
   * name and added the next time; without a name it is lost. Everything else travels unchanged.
   */
  FARANDOLE_WIRE_INT8 = 3
} farandole_wire;

/** Where tensors are. */
typedef enum farandole_device { FARANDOLE_CPU = 0, FARANDOLE_CUDA = 1 } farandole_device;

/** How this rank takes part with one tensor. */
typedef enum farandole_vote {
  FARANDOLE_PRESENT = 0, /**< contributes `in` */
  FARANDOLE_ABSENT =
      1, /**< contributes nothing and receives into `out`; averages divide by the full size */
  FARANDOLE_CLEAN = 2 /**< `in` was reduced before: contributed only if some rank is present */
} farandole_vote;

/** The library's version, "0.1.0". */
FARANDOLE_API const char* farandole_version(void);
/** The library's FARANDOLE_ABI_VERSION. */
FARANDOLE_API int farandole_abi_version(void);
/** The calling thread's last failure, "" if none. Valid until the thread's next farandole call. */
FARANDOLE_API const char* farandole_last_error(void);
/** What happened to the first rank that failed. */
typedef enum farandole_failure_kind {
  FARANDOLE_FAILURE_UNKNOWN = 0,
  FARANDOLE_FAILURE_ERROR = 1,             /**< its engine, or a library, reported an error */
  FARANDOLE_FAILURE_KILLED = 2,            /**< by a signal */
  FARANDOLE_FAILURE_EXITED = 3,            /**< with an exit code, before it left the job */
  FARANDOLE_FAILURE_OUT_OF_MEMORY = 4,     /**< the system killed it for want of memory */
  FARANDOLE_FAILURE_STOPPED = 5,           /**< SIGSTOP, or Ctrl-Z */
  FARANDOLE_FAILURE_FROZEN = 6,            /**< it gets no processor, as by a container's freezer */
  FARANDOLE_FAILURE_LINK_DOWN = 7,         /**< it cannot be reached any more */
  FARANDOLE_FAILURE_DIVERGED = 8,          /**< ranks wait for different operations */
  FARANDOLE_FAILURE_BLOCKED_IN_PYTHON = 9, /**< it is in Python code and submits nothing */
  FARANDOLE_FAILURE_BLOCKED_IN_C = 10      /**< it is in C code that holds Python's lock */
} farandole_failure_kind;

/** What is known of a failure besides its message. */
typedef struct farandole_failure {
  size_t struct_size;   /**< sizeof(farandole_failure) */
  const int32_t* ranks; /**< [rank_count] the ranks that failed, ascending */
  int32_t rank_count;   /**< 0: none did, as in a mismatch, or it is unknown which */
  int32_t kind;         /**< a farandole_failure_kind; of the first of them, as the rest */
  const char* cause;    /**< what failed; NULL: unknown */
  const char* tensor;   /**< the operation that failed, or of a group the tensor; NULL: not one */
  int32_t number;       /**< the signal or exit code; -1: none, or unknown */
  int32_t pid;          /**< its process; 0: unknown */
  const char* host;     /**< its host; NULL: unknown */
  const char* last;     /**< its last operation, such as: allreduce "x"; NULL: unknown */
  double last_age_s;    /**< seconds from that to the failure; -1: unknown */
} farandole_failure;
/** Of the calling thread's last failure. What it points to is valid as long as
 * farandole_last_error()'s text. Errors: INVALID_ARGUMENT for NULL or a struct of another size. */
FARANDOLE_API int farandole_last_failure(farandole_failure* out);

/* ---- Life cycle ---- */

/** A key-value store that all ranks reach, through which they exchange a few short values before
 * they are connected. Keys consist of letters, digits, dots, dashes and underscores; values are
 * bytes. Rank 0 sets a key again for its next job, and get then gives the last value: one store
 * serves one job after the other. Only threads inside farandole_init or farandole_init_for call the
 * functions, one at a time. They return a farandole_code. */
typedef struct farandole_store {
  void* user; /**< given to the functions; used until init has ended or was given up */
  /** Stores a value. PENDING, here and in get: not within a short time; it is called again. */
  int (*set)(void* user, const char* key, const void* value, size_t size);
  /** Waits up to `timeout_s`, which is short, for `key`. OK: it is there; PENDING: not yet. */
  int (*wait)(void* user, const char* key, double timeout_s);
  /** After wait said OK: writes the value, at most `capacity` bytes, and its whole size. */
  int (*get)(void* user, const char* key, void* value, size_t capacity, size_t* size);
} farandole_store;
/** What farandole_init should not take from the launcher. */
typedef struct farandole_init_options {
  size_t struct_size; /**< sizeof(farandole_init_options) */
  int rank;           /**< -1: as the launcher says; so are the two below */
  int size;           /**< with 1, nobody is waited for */
  int local_rank;     /**< among the ranks of this host */
  int apart;          /**< 1: no launcher is asked; the job may be one of some of its ranks */
  /** Where rank 0 listens, "host:port" or "tcp://host:port"; or "file:///folder", seen by all ranks
   * and new for each job; or "env://", for MASTER_ADDR and MASTER_PORT. NULL: as the launcher says.
   */
  const char* address;
  const farandole_store* store; /**< copied; instead of an address; NULL: none */
  /** An operation that has waited this long for a rank ends the job. FARANDOLE_STALL_SHUTDOWN_S
   * overrides it; up to a year; may differ by rank; 0: no limit. */
  double timeout_s;
  /** 1: all ranks start their operations in the same order, except those with a `function`. Ranks
   * that do not get an error after a second, not only when all their threads wait. The same on all
   * ranks. */
  int in_order;
  /** Parts of each step's work, from the number of ranks to 65536: sums of floats over all ranks
   * have the same bits for any number of ranks if each contributes the sum of its slots
   * (farandole_slot_range), and averages are these divided by the number of ranks. The same on all
   * ranks; 0: as FARANDOLE_SLOTS says, or, apart, none. */
  int slots;
  /** 1: the job is elastic, as by FARANDOLE_ELASTIC=1: see farandole_reinit. The same on all ranks.
   */
  int is_elastic;
  /** Where ranks of a running elastic job listen, "host:port,..." as farandole_members says it:
   * this process asks them to be let in, and takes the rank that they give it. FARANDOLE_MEMBERS;
   * NULL: as that says. */
  const char* members;
} farandole_init_options;
/** The default options. */
#define FARANDOLE_INIT_OPTIONS \
  { sizeof(farandole_init_options), -1, -1, -1, 0, NULL, NULL, 0, 0, 0, 0, NULL }

/** Joins the job of this process, over MPI or TCP (FARANDOLE_NETWORK); without a launcher, a job of
 * one rank. Settings come from FARANDOLE_* variables. Collective. `options` NULL: everything is as
 * the launcher says. If a launcher started several ranks, the options must agree with it. A job
 * with `apart` needs rank and size and, if there are several ranks, an address or a store; a
 * process may be in any number of such jobs. Errors: INVALID_ARGUMENT for an invalid setting or
 * option, for contradictions, and if the address of rank 0 is unknown; UNAVAILABLE if the MPI
 * plug-in cannot be loaded or sees another number of ranks, if rank 0 cannot be reached, or if an
 * earlier call timed out over MPI; MISMATCH if ranks have different settings or versions; TIMEOUT
 * if some rank did not join within FARANDOLE_INIT_TIMEOUT_S, which calls notice up to 4 s later:
 * over MPI the process can then exit, and should, over TCP it can join again. A thread of the
 * library joins. */
FARANDOLE_API int farandole_init(const farandole_init_options* options, farandole_context** out);
/** farandole_init in slices: with *context NULL it begins to join, and waits up to `timeout_s` (<
 * 0: no limit). PENDING: pass *context to this function again to continue, or to farandole_release
 * to give up, and to no other function; `options` is not read again, but the store's functions are
 * still called. On an error *context is NULL. After the release the process can join again: over
 * TCP nothing of the join remains; MPI can be initialized once, so over MPI it goes on, and
 * farandole_init with the same arguments goes on with it. */
FARANDOLE_API int farandole_init_for(const farandole_init_options* options, double timeout_s,
                                     farandole_context** context);
/** How farandole_reinit is called. */
typedef struct farandole_reinit_options {
  size_t struct_size; /**< sizeof(farandole_reinit_options) */
  double timeout_s;   /**< how long one call waits; < 0: no limit */
} farandole_reinit_options;
/** Goes on in an elastic job with the ranks that are left and those that have come: its next
 * generation, with ranks and a size of its own. After a failure that named lost ranks, after an
 * ABORTED because ranks have left or the members change, or when farandole_change_is_due: all ranks
 * call it. It ends `old`, if that has not ended; release it afterwards. What all ranks have started
 * is completed if they call this within 2 s of each other; who calls it first waits for up to 5
 * minutes for the others, unless they end.
 *
 * *next NULL begins. PENDING, after options->timeout_s (options NULL: no limit): call it again with
 * the same arguments; or, with *next not NULL, farandole_release(*next) gives up and leaves the
 * job. Errors: HALTED, with the reason, if others may go on without this process; INVALID_ARGUMENT
 * for a job that is not elastic, or over MPI, or in one process, or that this process has left by
 * farandole_shutdown. After any error *next is NULL, and after another one than INVALID_ARGUMENT
 * this process has left the job. */
FARANDOLE_API int farandole_reinit(farandole_context* old, const farandole_reinit_options* options,
                                   farandole_context** next);
/** Which generation of the job this is: 1, then growing numbers, alike on all ranks. */
FARANDOLE_API int farandole_generation_number(const farandole_context* context, uint64_t* number);
/** *is_due: whether processes wait to be let into this elastic job, as farandole_reinit of all
 * ranks does. Rank 0 is sure to know. */
FARANDOLE_API int farandole_change_is_due(const farandole_context* context, int* is_due);
/** Where `rank`, or -1: all ranks, of this elastic job listen for newcomers, as
 * init_options.members has it; "" if it is none. Valid until the thread's next farandole call. */
FARANDOLE_API int farandole_members(const farandole_context* context, int rank,
                                    const char** members);
/** `size` ranks inside this process, one context per rank, for tests and tools; each may be used by
 * its own thread. */
FARANDOLE_API int farandole_init_in_process(int size, farandole_context** out);
/** Leaves the job: waits until every rank has left, as long as the other ranks live, then stops the
 * threads. An elastic job goes on: within 4 s this rank is out, and the others' operations return
 * ABORTED, which says so. Pending work ends with ABORTED. Idempotent. If a thread hangs inside a
 * library for FARANDOLE_SHUTDOWN_TIMEOUT_S, it is left behind and the result is TIMEOUT: tensors
 * are not touched any more even if that thread returns, and farandole_release frees nothing. If a
 * process returns 0 from main, or calls exit(0), without this, an exit handler of the library shuts
 * it down. Errors: the one that ended the job, unless an operation, a work, gradients or
 * farandole_check has returned it already. */
FARANDOLE_API int farandole_shutdown(farandole_context* context);
/** farandole_shutdown in slices: begins or continues to leave for up to `timeout_s` (< 0: no
 * limit). PENDING: call it again, or end the process. exit(0) continues to wait; any other exit
 * code ends without waiting for the other ranks, which the launcher may then end. */
FARANDOLE_API int farandole_shutdown_for(farandole_context* context, double timeout_s);
/** Why a program ends. */
typedef enum farandole_exit {
  FARANDOLE_EXIT_OPEN = 0,     /**< its exit code, which is not known yet, will tell */
  FARANDOLE_EXIT_BY_ERROR = 1, /**< something has failed on this rank: the cause says what */
  FARANDOLE_EXIT_BY_OTHER = 2  /**< the cause names another rank; without one as by shutdown */
} farandole_exit;
/** farandole_shutdown_for in a program that is ending, perhaps by a failure that the errors of the
 * other ranks should name.
 * @param context    The rank that ends.
 * @param reason     farandole_exit. OPEN: ranks that wait for this one continue to wait, for at
 *                   most 5 s, until it calls exit, which sends them the code.
 * @param cause      The failure as text; else NULL.
 * @param timeout_s  As in farandole_shutdown_for. */
FARANDOLE_API int farandole_leave_at_exit(farandole_context* context, int32_t reason,
                                          const char* cause, double timeout_s);
/** Frees a context (shuts it down first). A context of farandole_init_in_process waits for the
 * others at most FARANDOLE_SHUTDOWN_TIMEOUT_S, as one thread may release them one after another.
 * NULL is fine. */
FARANDOLE_API void farandole_release(farandole_context* context);

/** Where a rank stands. */
typedef struct farandole_topology {
  int rank;       /**< 0 <= rank < size. */
  int size;       /**< Ranks of the job. */
  int local_rank; /**< Among the ranks of this host. */
  int local_size; /**< Ranks on this host. */
  int cross_rank; /**< Among the ranks with this local_rank. */
  int cross_size; /**< Hosts that have this local_rank. */
} farandole_topology;
/** OK while operations can be started; else the error that starting one would return: the one that
 * ended the job, or ABORTED after a shutdown or because another rank has left. */
FARANDOLE_API int farandole_check(const farandole_context* context);
/** Fills `out`. */
FARANDOLE_API int farandole_get_topology(const farandole_context* context, farandole_topology* out);
/** The slots of this rank, `begin` to `end` - 1, in a job with slots. They are those of one node of
 * the binary tree over all slots, cut at the last one: a rank adds up pairs of its slots with the
 * same parent, then pairs of these sums, and so on, and contributes the last sum; where a node has
 * one child that child's sum is its own. Sums of floats over all ranks go on in the same tree, so
 * their bits do not depend on the number of ranks, if contributions are float32 or float64 and
 * travel as they are. Floats on a GPU and the 8-bit wire are refused there. Errors:
 * INVALID_ARGUMENT if the job has no slots. */
FARANDOLE_API int farandole_slot_range(const farandole_context* context, int* begin, int* end);

/* ---- Collectives ---- */

/** What a tensor is on this rank, without its memory.
 *
 * A row is an index of the first dimension. Ranks pass equal shapes, except to an allgather and an
 * alltoall, where the number of rows may differ: shape[0] is then this rank's. */
typedef struct farandole_tensor {
  const char* name;     /**< in groups, for messages; may be NULL */
  int32_t dtype;        /**< farandole_dtype */
  int32_t ndim;         /**< dimensions, at most 64 */
  const int64_t* shape; /**< [ndim], elements; contiguous in whatever order all ranks share */
} farandole_tensor;

/** What all ranks must agree on besides the tensors. */
typedef struct farandole_params {
  size_t struct_size; /**< sizeof(farandole_params) */
  int32_t kind;       /**< farandole_kind */
  int32_t op;         /**< farandole_op; allreduce and reducescatter only */
  double prescale;    /**< multiplies each contribution; 1.0. PREMUL_SUM: may differ by rank */
  double postscale;   /**< multiplies the result; 1.0 */
  int32_t root;       /**< broadcast: global rank; otherwise -1 */
  int32_t wire;       /**< farandole_wire */
  uint32_t set;       /**< process set uid; 0: all ranks */
  uint32_t reserved;  /**< 0 */
  int32_t device;     /**< farandole_device; CPU where struct_size ends before it */
  uint32_t reserved2; /**< 0 */
  /** Alltoall: [tensors x ranks of the set], how many rows of each tensor go to each rank, in
   * ascending order of ranks; at most the tensor's rows in all. NULL: the same number to each, and
   * for the other kinds. Copied. */
  const int64_t* splits;
  /** If this operation is part of another function, such as the broadcast in a "broadcast_object",
   * the name of that function; NULL: the kind itself. Ranks that call another function under the
   * same name are then refused, and messages use this name. Copied; at most 4096 bytes. */
  const char* function;
} farandole_params;
/** Params of all ranks and host memory, without factors. Set what differs, such as `root`. */
static inline farandole_params farandole_params_of(int32_t kind, int32_t op) {
  const farandole_params params = {
      sizeof(farandole_params), kind, op, 1.0, 1.0, -1, 0, 0, 0, FARANDOLE_CPU, 0, NULL, NULL};
  return params;
}

/** Prepares `name` for repeated starts. The same name, kind, function and set return the same
 * operation. Its description is replaced if it is not in flight, and *version (may be NULL) becomes
 * that description's number. name NULL: the n-th unnamed call of this kind on this set, matched by
 * order; PENDING: it has to wait until an earlier unnamed call is done, call again. `count` tensors
 * are one group: decided together, finished together. Barrier: count 0. Each call returns a handle
 * to release. Once its process set has ended, starting it returns ABORTED; its
 * memory may then serve an operation of another set, with another version. Errors: INVALID_ARGUMENT
 * (bad dtype, shape, op, root; the same name is in flight with another description). */
FARANDOLE_API int farandole_prepare(farandole_context* context, const farandole_params* params,
                                    const char* name, const farandole_tensor* tensors,
                                    int32_t count, farandole_operation** out, uint32_t* version);
/** Releases one handle of farandole_prepare; an operation in flight continues. A name without a
 * handle that has not been used lately takes no memory on any rank. Any thread; NULL is fine. */
FARANDOLE_API void farandole_operation_release(farandole_operation* operation);
/** A stream of a CUDA device. */
typedef struct farandole_stream {
  size_t struct_size; /**< sizeof(farandole_stream) */
  int32_t device;     /**< as this process numbers its CUDA devices */
  void* stream;       /**< a cudaStream_t or CUstream; NULL: the legacy default stream */
} farandole_stream;

/** Gives memory for results whose size only the ranks together know. */
typedef struct farandole_allocator {
  size_t struct_size; /**< sizeof(farandole_allocator) */
  void* user;         /**< for `allocate` */
  /** A thread of the library calls it once per tensor, when `rows[r]` rows from the r-th rank of
   * the set are about to be written: `bytes` in all, which may be 0. It must not block or call the
   * library. It returns NULL if there is no memory: this rank's work then ends with
   * RESOURCE_EXHAUSTED, and that of the other ranks continues. On a GPU the operation writes after
   * everything that its stream holds when this returns, so earlier work in that stream may still
   * use the memory. */
  void* (*allocate)(void* user, int32_t tensor, const int64_t* rows, int32_t ranks, int64_t bytes);
} farandole_allocator;

/** Memory of the library: one tensor's result, or what farandole_buffer_allocate gave. */
typedef struct farandole_buffer farandole_buffer;

/** Memory of the caller for the result of one tensor. */
typedef struct farandole_output {
  void* data;    /**< borrowed until the work has finished; on the GPU of the operation's stream */
  int64_t bytes; /**< those of the result, neither more nor less */
  /** Allgather, alltoall: [ranks of the set] how many rows come from each, in ascending order of
   * ranks; NULL: as many as add up to `bytes`. NULL for the other kinds. Copied. */
  const int64_t* rows;
} farandole_output;
/** One start of an operation. All zero but `struct_size`, `in` and where the results go: exactly
 * one of `out`, `outputs`, `allocator` and `in_library`, unless the operation has no tensors.
 * Borrowed for the call; the tensors' memory until the work has finished. */
typedef struct farandole_request {
  size_t struct_size; /**< sizeof(farandole_request) */
  /** That of farandole_prepare, so that memory and description match even if another thread
   * prepares the same name; 0: any, for operations on all ranks only. */
  uint32_t version;
  /** 1: an allgather or alltoall puts results of any size into the library's memory, see
   * farandole_take_result. Not of farandole_run_request. */
  int32_t in_library;
  /** One address per tensor. in[i] may be NULL if this rank contributes no element; a broadcast
   * reads it on the root only. */
  const void* const* in;
  /** One address per tensor, with room for farandole_output_rows rows. If others come of an
   * allgather or alltoall, the work ends with MISMATCH on this rank. An alltoall that sends each
   * rank as many rows must also receive as many from each. out[i] may be equal to in[i], except for
   * allgather, reducescatter and alltoall, where they do not overlap. It may be NULL if this rank
   * receives no element, for an absent tensor, and on a broadcast's root. */
  void* const* out;
  /** One per tensor, whose size is checked. Of an allgather or alltoall any number of rows may come
   * from each rank; if others come than the memory is for, the work ends with MISMATCH on this
   * rank, which says what came, nothing is written there, and the other ranks' work goes on. */
  const farandole_output* outputs;
  const farandole_allocator* allocator; /**< of an allgather or alltoall: results of any size */
  const uint8_t* votes;                 /**< farandole_vote per tensor; NULL: all present */
  /** This rank's error text: the operation is refused on every rank with it; NULL: none. */
  const char* failed;
  /** Of an operation prepared with params.device FARANDOLE_CUDA, whose addresses are the device's:
   * it reads and writes after everything that this stream holds now; the host does not wait. For
   * farandole_wait and farandole_poll, work on a GPU has finished once it is launched in a stream
   * of its own. farandole_wait_on then orders another stream after it, farandole_is_complete says
   * when it is complete; until then the memory must stay. A context has one GPU, that of the first
   * such call. NULL on the CPU. */
  const farandole_stream* stream;
  /** Which may still use the allocator's memory instead of `stream`, as where an allocator follows
   * the current stream of its calling thread; NULL: `stream`. */
  const farandole_stream* memory_stream;
} farandole_request;

/** Starts an operation. Never blocks. Release the work once.
 *
 * Results: allgather: the rows of all ranks in rank order. Reducescatter: this rank's split of the
 * rows; the first (rows % size) ranks get one row more than the others. Alltoall: what each rank
 * sends this one, in rank order.
 *
 * Errors: INVALID_ARGUMENT if the operation is in flight ("... is already in flight"), was
 * redefined, memory that is needed is NULL, results go to no place or to several, an output has
 * another size than the result as far as this rank knows it, or overlaps the input unless an
 * allreduce or broadcast has both in one place; for results of any size of another kind than
 * allgather and alltoall; for a stream of another device, or one that is being captured into a
 * graph; ABORTED if its process set has ended; UNAVAILABLE, with the reason, if no GPU can be used;
 * the context's final error. */
FARANDOLE_API int farandole_start_request(farandole_operation* operation,
                                          const farandole_request* request, farandole_work** work);
/** Starts and waits up to timeout_s (<0: without limit), without waking another thread: the fastest
 * way for one blocking operation in host memory. Returns the outcome with *work NULL, or PENDING
 * with the work to go on waiting for. Errors: as start; INVALID_ARGUMENT for what needs its work
 * afterwards: a stream, or results in the library's memory. */
FARANDOLE_API int farandole_run_request(farandole_operation* operation,
                                        const farandole_request* request, double timeout_s,
                                        farandole_work** work);
/** How many rows a rank receives of a tensor with `rows` of them, if all ranks of the set pass as
 * many: those of all ranks of an allgather, this rank's split of a reducescatter, else `rows`.
 * kind: farandole_kind. Errors: INVALID_ARGUMENT if there is no such set or kind; ABORTED if it has
 * ended. */
FARANDOLE_API int farandole_output_rows(const farandole_context* context, int32_t kind,
                                        uint32_t set, int64_t rows, int64_t* out);

/** farandole_start_request with results in `out`. */
static inline int farandole_start(farandole_operation* operation, uint32_t version,
                                  const void* const* in, void* const* out, const uint8_t* votes,
                                  const char* failed, farandole_work** work) {
  const farandole_request request = {
      sizeof(farandole_request), version, 0, in, out, NULL, NULL, votes, failed, NULL, NULL};
  return farandole_start_request(operation, &request, work);
}
/** Likewise on a GPU. */
static inline int farandole_start_on(farandole_operation* operation, uint32_t version,
                                     const void* const* in, void* const* out, const uint8_t* votes,
                                     const char* failed, const farandole_stream* stream,
                                     farandole_work** work) {
  const farandole_request request = {
      sizeof(farandole_request), version, 0, in, out, NULL, NULL, votes, failed, stream, NULL};
  return farandole_start_request(operation, &request, work);
}
/** farandole_start_request with results of any size; allocator NULL: in the library's memory. */
static inline int farandole_start_allocating_on(farandole_operation* operation, uint32_t version,
                                                const void* const* in,
                                                const farandole_allocator* allocator,
                                                const farandole_stream* stream,
                                                const farandole_stream* memory_stream,
                                                farandole_work** work) {
  const farandole_request request = {sizeof(farandole_request),
                                     version,
                                     allocator == NULL,
                                     in,
                                     NULL,
                                     NULL,
                                     allocator,
                                     NULL,
                                     NULL,
                                     stream,
                                     memory_stream};
  return farandole_start_request(operation, &request, work);
}
/** Likewise, with memory of `stream`. */
static inline int farandole_start_allocating(farandole_operation* operation, uint32_t version,
                                             const void* const* in,
                                             const farandole_allocator* allocator,
                                             const farandole_stream* stream,
                                             farandole_work** work) {
  return farandole_start_allocating_on(operation, version, in, allocator, stream, NULL, work);
}
/** farandole_start_request with `outputs`. */
static inline int farandole_start_into(farandole_operation* operation, uint32_t version,
                                       const void* const* in, const farandole_output* out,
                                       const farandole_stream* stream, farandole_work** work) {
  const farandole_request request = {
      sizeof(farandole_request), version, 0, in, NULL, out, NULL, NULL, NULL, stream, NULL};
  return farandole_start_request(operation, &request, work);
}
/** farandole_run_request with results in `out`. */
static inline int farandole_run(farandole_operation* operation, uint32_t version,
                                const void* const* in, void* const* out, double timeout_s,
                                farandole_work** work) {
  const farandole_request request = {
      sizeof(farandole_request), version, 0, in, out, NULL, NULL, NULL, NULL, NULL, NULL};
  return farandole_run_request(operation, &request, timeout_s, work);
}
/** farandole_run_request with `outputs`. */
static inline int farandole_run_into(farandole_operation* operation, uint32_t version,
                                     const void* const* in, const farandole_output* out,
                                     double timeout_s, farandole_work** work) {
  const farandole_request request = {
      sizeof(farandole_request), version, 0, in, NULL, out, NULL, NULL, NULL, NULL, NULL};
  return farandole_run_request(operation, &request, timeout_s, work);
}
/** Allgather, alltoall: how many rows of tensor i came from each rank of the set, into
 * rows[0..ranks-1]. After the work has finished well. Errors: INVALID_ARGUMENT if `ranks` is
 * another number than there are. */
FARANDOLE_API int farandole_received_rows(const farandole_work* work, int32_t i, int64_t* rows,
                                          int32_t ranks);
/** Returns tensor i's result in the library's memory, once, after the work has succeeded. It stays
 * until it is released, even after the work and the context. Errors:
 * INVALID_ARGUMENT if there is none. */
FARANDOLE_API int farandole_take_result(farandole_work* work, int32_t i, farandole_buffer** result);
/** Allocates host memory for tensors, zeroed and page-aligned. If tensors lie in such memory on
 * every rank, and the ranks of the process set share memory (processes of one host, or ranks of one
 * process), an allreduce in place (in[i] equal to out[i]) without prescale needs no copy. Other
 * operations work as with other memory and give the same bits. Each rank allocates its own. Release
 * it when no work uses it, also after the context. After a final error other ranks may still write
 * to it, so it is kept until the process ends. Errors: INVALID_ARGUMENT for less than 0 bytes;
 * RESOURCE_EXHAUSTED. */
FARANDOLE_API int farandole_buffer_allocate(farandole_context* context, int64_t bytes,
                                            farandole_buffer** out);
/** Its address; on the GPU of the operation's stream, or in host memory. */
FARANDOLE_API void* farandole_buffer_data(const farandole_buffer* buffer);
/** Its size; 0 for NULL. */
FARANDOLE_API int64_t farandole_buffer_bytes(const farandole_buffer* buffer);
/** Frees it. NULL is fine. On a GPU it waits until nothing uses the memory. */
FARANDOLE_API void farandole_buffer_release(farandole_buffer* buffer);

/** farandole_wait until launched; on success, work put into `stream` from now on runs after the
 * operation, and the host continues at once. INVALID_ARGUMENT for a stream of another
 * device than the operation's. */
FARANDOLE_API int farandole_wait_on(farandole_work* work, const farandole_stream* stream,
                                    double timeout_s);
/** OK once the library no longer uses the memory (on the CPU: once the work has finished), PENDING
 * before; the error of work that failed. */
FARANDOLE_API int farandole_is_complete(const farandole_work* work);
/** Blocks up to timeout_s (<0: without limit). Returns the work's outcome, or PENDING. */
FARANDOLE_API int farandole_wait(farandole_work* work, double timeout_s);
/** What farandole_when_finished calls, with the work's outcome; farandole_last_error() has its
 * error message meanwhile, for this thread. It must not throw. */
typedef void (*farandole_finished)(void* user, int code);
/** Calls `call(user, outcome)` exactly once when the work has succeeded or failed, also if the
 * process set ended or the context was shut down; on a GPU when it is launched. If it has finished,
 * this thread calls now; otherwise a thread of the library that does nothing else, so the call may
 * take long, start operations, wait for others, and release the work. The library adds threads if
 * other calls are due meanwhile; their order is undefined. You may release the handle before.
 * farandole_shutdown and farandole_release wait until all calls have returned, except inside such a
 * call, where the memory of a released context is leaked. At program exit the library waits for
 * calls for up to 1 s. Any number of times for one work. A forked child calls nothing.
 * Errors: RESOURCE_EXHAUSTED: no thread could be created, and nothing is called. */
FARANDOLE_API int farandole_when_finished(farandole_work* work, farandole_finished call,
                                          void* user);
/** For callers that wait without a limit in slices, for example to check for signals in between:
 * from a call with threads > 0 to one with 0, a wait of this thread with a time limit counts as one
 * without, so that a divergence is detected (FARANDOLE_DIVERGENCE_CHECK). `threads`: how many
 * threads of the program may start operations; while fewer have done so, nothing is detected.
 * `helpers`: how many further ones might; while fewer have done so, or where no thread says how
 * many there are, ranks that wait for different operations are given a second to start what is
 * missing before that is an error. */
FARANDOLE_API void farandole_wait_in_slices(int32_t threads, int32_t helpers);
/** For threads that run a part of the program now and then, such as those of a pool: until its next
 * call the calling thread is none of those of which all must wait for a divergence. */
FARANDOLE_API void farandole_leave_thread(void);
/** For programs whose calls come from the threads of a library, while the program's own wait for
 * these: from here on all threads of the process are so but while they wait for an operation. */
FARANDOLE_API void farandole_count_waiting_threads(void);

/** Time of the program that the library cannot see: waiting for input, or garbage collection. */
enum { FARANDOLE_TIME_INPUT = 0, FARANDOLE_TIME_GARBAGE_COLLECTION = 1 };
/** `ns` have just been spent so: waiting for input by the calling thread, which trains, garbage
 * collection by the process. It explains a rank that is late. Another value of `what`, and times
 * below 1 or above 10^15, are ignored. Any thread; takes a few nanoseconds. */
FARANDOLE_API void farandole_note_time(int what, int64_t ns);
/** The calling thread has ended a step of training, which all ranks take: so that a rank that makes
 * the others wait, step after step, is named. At the same point of each step on all ranks, by one
 * thread. Rounds of gradients (farandole_gradients_create) of all ranks count theirs themselves.
 * Waits for nobody. */
FARANDOLE_API void farandole_end_step(farandole_context* context);

/** Writes where these threads of the program are (numbers as of pthread_self; none: the main
 * thread) into `text`, which has room for `capacity` bytes and ends with 0; nothing: unknown. It
 * may wait for an interpreter's lock. */
typedef void (*farandole_describe)(const uint64_t* threads, size_t count, char* text,
                                   size_t capacity);
/** For the runtime of an interpreted language: while other ranks wait for this one, `describe` is
 * called, on a thread made for that, and its text is a part of their stall reports and of the error
 * that ends a stall; if it does not return within 0.3 s, they say that the rank is inside C code
 * that holds the interpreter's lock. For the whole process. NULL, before the interpreter ends, with
 * its lock released: nothing is called any more when this returns. Again in a forked child. */
FARANDOLE_API void farandole_describe_with(farandole_describe describe);
/** 1 when finished (well or not), 0 before. Hands collected submissions to the engine. */
FARANDOLE_API int farandole_poll(farandole_work* work);
/** 1 if no rank contributed tensor i: `out` was not written. After the work has finished. */
FARANDOLE_API int farandole_skipped(const farandole_work* work, int32_t i);
/** Releases the handle. A work still in flight goes on: its memory must stay valid until it has
 * finished. */
FARANDOLE_API void farandole_work_release(farandole_work* work);

/** Another farandole_init_options.timeout_s, of what waits already too, and of later generations.
 * All ranks pass the same. FARANDOLE_STALL_SHUTDOWN_S overrides it, as at init. Not beside
 * farandole_setting or farandole_reinit. */
FARANDOLE_API int farandole_set_timeout(farandole_context* context, double timeout_s);

/** Joins: this rank is absent from all operations that it has not submitted, until all ranks have
 * joined. Blocks up to timeout_s as wait does; call again after PENDING. *last_rank: the rank that
 * joined last. */
FARANDOLE_API int farandole_join(farandole_context* context, double timeout_s, int* last_rank);

/* ---- Process sets ---- */

/** A set of `count` distinct ranks, for params.set once the work has finished. Collective: every
 * rank of the job, member or not, passes the same ranks, and calls are matched by their order: the
 * n-th of one rank means the n-th of the others, so a rank that calls from several threads must
 * order them. The work fails on all ranks with MISMATCH, naming both lists, where they differ; with
 * INVALID_ARGUMENT if there is such a set already; with RESOURCE_EXHAUSTED while 16,382 sets are
 * live. Uids are never used again; all else that a set needed is free once it is removed. Errors:
 * INVALID_ARGUMENT for ranks that do not exist or repeat; RESOURCE_EXHAUSTED while 256 calls are
 * in flight. */
FARANDOLE_API int farandole_set_add(farandole_context* context, const int32_t* ranks, int32_t count,
                                    farandole_work** work);
/** The uid of the set with exactly these ranks, in any order: this rank's number for it, in this
 * generation. Errors: INVALID_ARGUMENT if there is none. */
FARANDOLE_API int farandole_set_find(const farandole_context* context, const int32_t* ranks,
                                     int32_t count, uint32_t* uid);
/** Removes a set: operations that are ready on all its members run, the others end with ABORTED.
 * Collective, and matched by the order of calls, as add. */
FARANDOLE_API int farandole_set_remove(farandole_context* context, uint32_t uid,
                                       farandole_work** work);

/* ---- Gradients of one optimizer ---- */

/** How the gradients of one optimizer are grouped and exchanged. */
typedef struct farandole_gradient_options {
  size_t struct_size; /**< sizeof(farandole_gradient_options) */
  /** Of the operations' names, distinct per optimizer. NULL: optimizers are numbered in the order
   * of their creation, and ranks compare what they wrap. */
  const char* prefix;
  /** What they compare, texts; NULL: names, dtypes and shapes. */
  const char* const* labels;
  int32_t label_count; /**< of labels; 0 without */
  int32_t has_flag;    /**< 1: for farandole_gradients_raise_flag */
  int32_t is_late;     /**< 1: gradients are due at the end of a backward pass, not during it */
  /** Of a group; 0: the setting FARANDOLE_GROUP_BYTES, or with FARANDOLE_AUTOTUNE=1 what is found
   * better in the first optimizer's first steps. */
  int64_t group_bytes;
  /** Gives memory to the result of gradient `tensor` where this rank marked it absent with `out`
   * NULL and another rank contributed one; `rows` is NULL. NULL: the library's memory, see
   * farandole_gradients_take_result. It is called as of a
   * farandole_request whose memory_stream is NULL of the device. */
  const farandole_allocator* allocator;
} farandole_gradient_options;

/** What is known of an optimizer's rounds. */
typedef struct farandole_round_status {
  size_t struct_size;     /**< sizeof(farandole_round_status) */
  int32_t is_open;        /**< a round is, and has not ended */
  int32_t is_pending;     /**< a round has ended, and nobody has waited for it */
  int32_t is_window_full; /**< the pass that began last is the last of its window */
  int32_t has_window;     /**< a round is open, or passes of its window were counted */
  int32_t has_marked;     /**< a gradient was marked in the open round */
  int32_t has_unreduced;  /**< gradients were accumulated that no successful round has reduced */
  int32_t flag;           /**< some rank raised its flag in the round last waited for */
  int32_t groups;         /**< formed; 0 before the first round; autotuning changes them */
  int32_t number;         /**< of the optimizer, from 0; -1: a prefix was given */
  int64_t rounds;         /**< that were waited for, failed ones included */
  int64_t succeeded;      /**< of them */
  /** Why the gradients are not reduced: what a round failed with, or what note_failure was told;
   * until the next open or forget. NULL: no failure. Valid until the next call. */
  const char* failure;
  int32_t is_interrupted; /**< that is: the round goes on, and nobody used its results here */
} farandole_round_status;

/** Groups gradients at the source: in the first round all are one group; the order in which the
 * set's first rank marked them then forms groups of about group_bytes with a small last one.
 * `params` as above (allreduce). Same tensors on every rank. options NULL: all defaults. One thread
 * at a time. Errors: INVALID_ARGUMENT. */
FARANDOLE_API int farandole_gradients_create(farandole_context* context,
                                             const farandole_params* params,
                                             const farandole_gradient_options* options,
                                             const farandole_tensor* tensors, int32_t count,
                                             farandole_gradients** out);
/** The optimizer goes on in another context, as on all its ranks in the same order, those included
 * that create theirs; `set` and `labels` as in params and options. What is known of the gradients
 * and the counts of rounds stays; groups form and steps count anew. context NULL: in none until the
 * next call, and before the end of the context that they have. Errors: INVALID_ARGUMENT in flight.
 */
FARANDOLE_API int farandole_gradients_rebind(farandole_gradients* gradients,
                                             farandole_context* context, uint32_t set,
                                             const char* const* labels, int32_t count);
/** Gives the `count` gradients other shapes and dtypes, and all of them a farandole_device, before
 * the first mark of a round. Groups and names stay. Errors: INVALID_ARGUMENT for another count, or
 * within a round. */
FARANDOLE_API int farandole_gradients_redefine(farandole_gradients* gradients,
                                               const farandole_tensor* tensors, int32_t count,
                                               int32_t device);
/** Adds gradients, numbered from the last one on: the same on every rank in the same round, or that
 * is a MISMATCH. Errors: INVALID_ARGUMENT between end and wait. */
FARANDOLE_API int farandole_gradients_add(farandole_gradients* gradients,
                                          const farandole_tensor* tensors, int32_t count);
/** The coming windows have so many backward passes each; 1 without this, 0 means the same. */
FARANDOLE_API int farandole_gradients_set_passes(farandole_gradients* gradients, int32_t passes);
/** A backward pass begins; no_sync 1: it only accumulates. If it is the last of its window
 * (farandole_round_status.is_window_full), open a round. If ranks differ in their passes since the
 * last step, all get MISMATCH for the round, with what each did. Ranks that count no pass are not
 * compared. */
FARANDOLE_API int farandole_gradients_count_pass(farandole_gradients* gradients, int32_t no_sync);
/** Opens a round, if none is open, forgets the last failure, and announces this rank's step to the
 * other ranks, without waiting. If steps differ, all operations of all ranks return MISMATCH from
 * then on, until shutdown: a rank may be in a collective that the others will never call. */
FARANDOLE_API int farandole_gradients_open(farandole_gradients* gradients);
/** Gradient i was accumulated. *due: the gradient to mark now, which is one that was accumulated
 * before this, as often as in earlier rounds; -1: none; -2: no round is open. Errors:
 * INVALID_ARGUMENT if it was marked in this round. */
FARANDOLE_API int farandole_gradients_accumulated(farandole_gradients* gradients, int32_t i,
                                                  int32_t* due);
/** The next gradient that is not marked, accumulated ones first; -1: all are. */
FARANDOLE_API int32_t farandole_gradients_next(const farandole_gradients* gradients);
/** Gradient i takes part in this round, once; opens one if none is. Its group is started when it is
 * full. in NULL: absent; out NULL: see farandole_gradient_options.allocator. stream: on a GPU
 * (FARANDOLE_CUDA) the one in which the gradient is made; NULL in host memory. */
FARANDOLE_API int farandole_gradients_mark(farandole_gradients* gradients, int32_t i,
                                           const void* in, void* out, int32_t vote,
                                           const farandole_stream* stream);
/** 1 if i was marked in the round that is open. */
FARANDOLE_API int farandole_gradients_marked(const farandole_gradients* gradients, int32_t i);
/** Raises this rank's flag in the coming or open round: a bit that all ranks learn, see
 * farandole_round_status. Of optimizers with options.has_flag on every rank. */
FARANDOLE_API int farandole_gradients_raise_flag(farandole_gradients* gradients);
/** Before a round ends: waits up to timeout_s (<0: without limit) until all ranks have created as
 * many optimizers, and compares them; PENDING as in wait. At once where that has been done, or a
 * prefix was given. Errors: MISMATCH, after which the round is not open any more. */
FARANDOLE_API int farandole_gradients_compare(farandole_gradients* gradients, double timeout_s);
/** Ends the round: starts what is left. Every gradient must have been marked, unless `failed` is
 * this rank's error text: then what was not started is refused on every rank with it. */
FARANDOLE_API int farandole_gradients_end(farandole_gradients* gradients, const char* failed);
/** Waits until the ended round has finished everywhere; the first failure if there was one. PENDING
 * as in wait. stream not NULL: on a GPU waits until all is launched; then, if that went well, what
 * is put into `stream` from now on comes after the round. */
FARANDOLE_API int farandole_gradients_wait(farandole_gradients* gradients,
                                           const farandole_stream* stream, double timeout_s);
/** The optimizer has used the reduced gradients, on all ranks: later rounds belong to the next
 * step. The count of steps restarts after a failed round and after a join; gradients of different
 * steps are never reduced together. Without effect if no round succeeded since the last call. */
FARANDOLE_API int farandole_gradients_stepped(farandole_gradients* gradients);
/** What failed outside of the round, as the use of its results; NULL: the wait was interrupted. The
 * first failure counts. */
FARANDOLE_API int farandole_gradients_note_failure(farandole_gradients* gradients, const char* why);
/** The gradients are given up: neither a failure nor a window that has begun counts any more. */
FARANDOLE_API int farandole_gradients_forget(farandole_gradients* gradients);
/** Fills *status. */
FARANDOLE_API int farandole_gradients_status(const farandole_gradients* gradients,
                                             farandole_round_status* status);
/** *rounds: how many are complete, from the first: their memory is touched no more. Errors: the
 * device has failed. */
FARANDOLE_API int farandole_gradients_complete(farandole_gradients* gradients, int64_t* rounds);
/** 1 if no rank contributed gradient i in the round last waited for. */
FARANDOLE_API int farandole_gradients_skipped(const farandole_gradients* gradients, int32_t i);
/** Hands over the result of gradient i in the library's memory, once per round. After the wait.
 * Errors: INVALID_ARGUMENT if there is none. */
FARANDOLE_API int farandole_gradients_take_result(farandole_gradients* gradients, int32_t i,
                                                  farandole_buffer** result);
/** Frees them; a round in flight goes on, and its memory and its allocator must stay valid until it
 * has ended. */
FARANDOLE_API void farandole_gradients_release(farandole_gradients* gradients);

/* ---- Observation ---- */

/** Fills up to `capacity` names and values, where these are not NULL, and returns how many counters
 * there are. Names are static strings. */
FARANDOLE_API int32_t farandole_counters(const farandole_context* context, const char** names,
                                         int64_t* values, int32_t capacity);

/** Starts to write a timeline for chrome://tracing into a file. "{rank}" in the path becomes this
 * rank's number; without it only rank 0 writes. marks_cycles: 1 marks rank 0's decisions. Errors:
 * INVALID_ARGUMENT if another file is being written; UNAVAILABLE if it cannot be opened. */
FARANDOLE_API int farandole_timeline_start(farandole_context* context, const char* path,
                                           int marks_cycles);
/** Writes the rest and closes the file. Fine if there is none. Errors: UNAVAILABLE if something
 * could not be written. */
FARANDOLE_API int farandole_timeline_stop(farandole_context* context);

/** SHA-256 (FIPS 180-4) of `size` bytes, into the 32 bytes at `digest`; for hashes of states and of
 * files. No context is needed. Errors: INVALID_ARGUMENT for NULL; `data` may be, with size 0. */
FARANDOLE_API int farandole_sha256(const void* data, size_t size, uint8_t* digest);

/** The value of the setting called "FARANDOLE_...", as text in the form that is accepted as input.
 * Valid until the thread's next farandole call. Errors: INVALID_ARGUMENT if there is none. */
FARANDOLE_API int farandole_get_setting(const farandole_context* context, const char* name,
                                        const char** value);

/** One setting after the other, from index 0 on: its name, its value, and the value it has where
 * none is given; texts that are valid until the thread's next farandole call. Past the last one
 * `name` is NULL. Errors: INVALID_ARGUMENT for NULL. */
FARANDOLE_API int farandole_setting_at(const farandole_context* context, int64_t index,
                                       const char** name, const char** value, const char** initial);

#ifdef __cplusplus
}
#endif
#endif /**< FARANDOLE_H_ */
