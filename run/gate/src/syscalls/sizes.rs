//! The sizes of the kernel's structs on x86-64, each with its name in C. A test compiles them.

macro_rules! sizes {
    ($($name:ident = $bytes:literal, $c:literal;)*) => {
        $(#[doc = $c] pub const $name: usize = $bytes;)*
        /// Each struct's name in C, and its size in bytes here.
        #[cfg(test)]
        pub const ALL: &[(&str, usize)] = &[$(($c, $bytes)),*];
    };
}

sizes! {
    STAT = 144, "struct stat";
    STATFS = 120, "struct statfs";
    STATX = 256, "struct statx";
    USTAT = 32, "struct old_ustat";
    UTIMBUF = 16, "struct utimbuf";
    TIMESPEC = 16, "struct timespec";
    TIMESPECS = 32, "struct timespec[2]";
    TIMEVAL = 16, "struct timeval";
    TIMEVALS = 32, "struct timeval[2]";
    TIMEZONE = 8, "struct timezone";
    TIMEX = 208, "struct timex";
    ITIMERVAL = 32, "struct itimerval";
    ITIMERSPEC = 32, "struct itimerspec";
    RUSAGE = 144, "struct rusage";
    RLIMIT = 16, "struct rlimit64";
    SYSINFO = 112, "struct sysinfo";
    TMS = 32, "struct tms";
    UTSNAME = 390, "struct utsname";
    POLLFD = 8, "struct pollfd";
    EPOLL_EVENT = 12, "struct epoll_event";
    SIGACTION = 32, "struct kernel_sigaction";
    SIGINFO = 128, "siginfo_t";
    SIGEVENT = 64, "struct sigevent";
    STACK = 24, "stack_t";
    SCHED_PARAM = 4, "struct sched_param";
    MQ_ATTR = 64, "struct mq_attr";
    SHMID_DS = 112, "struct shmid_ds";
    SHMINFO = 72, "struct shminfo";
    SHM_INFO = 48, "struct shm_info";
    MSQID_DS = 120, "struct msqid_ds";
    MSGINFO = 32, "struct msginfo";
    SEMID_DS = 104, "struct semid_ds";
    SEMINFO = 40, "struct seminfo";
    SEMBUF = 6, "struct sembuf";
    FLOCK = 32, "struct flock";
    F_OWNER_EX = 8, "struct f_owner_ex";
    IOVEC = 16, "struct iovec";
    MSGHDR = 56, "struct msghdr";
    MMSGHDR = 64, "struct mmsghdr";
    SOCK_FPROG = 16, "struct sock_fprog";
    SOCK_FILTER = 8, "struct sock_filter";
    IOCB = 64, "struct iocb";
    IO_EVENT = 32, "struct io_event";
    CAP_HEADER = 8, "struct __user_cap_header_struct";
    CAP_DATA = 12, "struct __user_cap_data_struct";
    USER_REGS = 216, "struct user_regs_struct";
    USER_FPREGS = 512, "struct user_fpregs_struct";
    KEXEC_SEGMENT = 32, "struct kexec_segment";
    FUTEX_WAITV = 24, "struct futex_waitv";
    CACHESTAT_RANGE = 16, "struct { __u64 off, len; }";
    CACHESTAT = 40, "struct { __u64 nr[5]; }";
    DQBLK = 72, "struct if_dqblk";
    NEXT_DQBLK = 72, "struct if_nextdqblk";
    DQINFO = 24, "struct if_dqinfo";
    FS_DISK_QUOTA = 112, "struct fs_disk_quota";
    FS_QUOTA_STAT = 80, "struct fs_quota_stat";
    FS_QUOTA_STATV = 160, "struct fs_quota_statv";
}
