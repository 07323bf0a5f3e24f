-- One program per file, named after it without its number: 00_one_process.cpp is build/examples/one_process.
set_group("examples")

for _, file in ipairs(os.files(path.join(os.scriptdir(), "*.cpp"))) do
    target((path.basename(file):gsub("^%d+_", "")))
        set_kind("binary")
        set_targetdir("$(projectdir)/build/examples")
        add_deps("lockstep")
        add_files(file)
        add_syslinks("pthread", "z")
        add_sysincludedirs("$(eigen)")
        set_optimize("fastest")
        -- Eigen uses the vector instructions it is compiled for, and x86-64's baseline has the oldest ones
        -- only. Examples run where they are built, so they may use all that this machine has.
        add_cxflags("-march=native")
    target_end()
end
